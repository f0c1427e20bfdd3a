"""inspect, estimate, compare, evaluate, export, report, images and demo."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lbyl
from lbyl.app.sources import resolve


def test_inspect(run: Any, run_json: Any) -> None:
    told = run_json("inspect", "lbyl:resnet20_cifar10")
    assert len(told["units"]) == 9
    assert told["units"][0]["producers"] == ["layer1.0.conv1"]
    assert told["units"][0]["consumers"] == ["layer1.0.conv2"]
    assert "linear" in told["unprunable"]
    shown = run("inspect", "lbyl:resnet20_cifar10").stdout
    assert "layer3.2.conv1" in shown and "unprunable" in shown
    residual = run_json("inspect", "lbyl:resnet20_cifar10", "--residual")
    assert any(unit["residual"] for unit in residual["units"])


def test_inspect_full_prints_every_consequence(run: Any, small: list[str]) -> None:
    shown = run("inspect", *small, "--full").stdout
    assert "made by    0" in shown and "read by    3" in shown


@pytest.mark.usefixtures("whole_forecast")
def test_estimate_tells_what_is_kept_at_every_ratio(run: Any, run_json: Any) -> None:
    arguments = ["lbyl:digits", "--weights", "shipped", "--ratio", "0.7", "--ratio", "0.05"]
    points = run_json("estimate", *arguments)["points"]
    assert [point["ratio"] for point in points] == [0.05, 0.7]  # a curve, whatever the order
    kept = [point["forecast"]["kept"] for point in points]
    assert kept[0] > kept[1] and points[0]["macs"] > points[1]["macs"]
    shown = run("estimate", *arguments, "--full").stdout
    assert "keeps about" in shown and "70 % pruned" in shown and "restored by echo" in shown
    largest = max((p["ratio"] for p in points if p["forecast"]["low"] >= 0.95), default=None)
    assert largest is not None and f"recommended: --ratio {largest:g} --method echo" in shown


def test_compare(run: Any, run_json: Any) -> None:
    arguments = ["lbyl:digits", "--weights", "shipped", "--ratio", "0.5", "--test", "digits"]
    arguments += ["--limit", "200", "--method", "none", "--method", "echo"]
    told = run_json("compare", *arguments, "--criterion", "l1", "--criterion", "l2")
    assert [(r["criterion"], r["method"]) for r in told["rows"]] == [
        ("l1", "none"),
        ("l1", "echo"),
        ("l2", "none"),
        ("l2", "echo"),
    ]
    accuracy = [row["accuracy"] for row in told["rows"]]
    assert accuracy[1] > accuracy[0] + 20 and accuracy[3] > accuracy[2] + 20
    assert told["original"]["accuracy"] >= max(accuracy) - 1


def test_compare_without_a_test_set_shows_what_is_forecast(run: Any) -> None:
    digits = ["lbyl:digits", "--weights", "shipped", "--ratio", "0.3"]
    shown = run("compare", *digits, "--method", "none", "--method", "lbyl").stdout
    assert "keeps about" in shown and "accuracy is measured" in shown
    assert re.search(r"lbyl +0\.3 +\d+ % \(\d+–\d+\)", shown)
    assert "criterion" not in shown  # one for all tells nothing


def test_compare_tells_errors_of_all_methods_on_the_same_statistics(
    run_json: Any, small: list[str]
) -> None:
    names = ["none", "lbyl", "echo", "moments", "fold"]
    methods = [word for name in names for word in ("--method", name)]
    rows = run_json("compare", *small, "--data", "64", *methods, "--criterion", "l1")["rows"]
    by_method = {row["method"]: row for row in rows}
    assert list(by_method) == names
    assert by_method["echo"]["error"] < by_method["none"]["error"]
    assert by_method["moments"]["error"] is not None  # data that are given come first
    assert by_method["fold"]["error"] is None  # folding changes the kept channels themselves
    assert by_method["fold"]["criterion"] is None and by_method["lbyl"]["criterion"] == "l1"
    other = run_json("compare", *small, "--method", "echo", "--method", "moments")["rows"]
    assert other[0]["error"] is not None and other[1]["error"] is None  # on other statistics


def test_what_would_be_ignored_or_has_nothing_to_do_is_refused_in_a_line(
    run: Any, small: list[str], slim: Path, tmp_path: Path
) -> None:
    plan = json.loads((slim / "plan.json").read_text())
    for name, left_out in (("rows", "rows"), ("result", "")):
        del (plan["result"] if left_out else plan)[name]
        shutil.copytree(slim, tmp_path / name)
        (tmp_path / name / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "nothing").mkdir()
    for arguments, said in (
        (["compare", *small, "--method", "fold", "--criterion", "l1"], "leave --criterion out"),
        (["compare", *small, "--method", "none", "--data", "32"], "--data was given"),
        (["compare", *small, "--limit", "3"], "--test"),
        (["evaluate", "lbyl:digits"], "--test"),
        (["report", tmp_path / "nothing"], "no plan.json"),
        (["report", tmp_path / "rows"], "incomplete: 'rows'"),
        (["report", tmp_path / "result"], "holds no result"),
        (["images", tmp_path / "a.xyz"], "must end like an image"),
        (["images", tmp_path / "a.png", "--classes", "3"], "add --model"),
        (["export", slim, "--out", "x.bin"], "end in .onnx, .pt2"),
    ):
        result = run(*arguments, code=2)
        assert said in result.stderr and "✓ c" not in result.stderr


def test_evaluate_a_compressed_directory(run_json: Any, slim: Path) -> None:
    told = run_json("evaluate", slim, "--test", "digits", "--time")
    whole = run_json("evaluate", "lbyl:digits", "--weights", "shipped", "--test", "digits")
    again = run_json("evaluate", "lbyl:digits", "--weights", slim, "--test", "digits")
    assert told["accuracy"] == again["accuracy"] > 90
    assert told["parameters"] < whole["parameters"]
    assert told["seconds"] > 0 and told["images"] == 797


def test_export_onnx_and_program(run_json: Any, run: Any, slim: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    told = run_json("export", slim, "--out", tmp_path / "x" / "slim.onnx")
    assert 0 <= told["error"] < 1e-3
    assert (tmp_path / "x" / "slim.onnx").stat().st_size == told["bytes"]
    run("export", slim, "--out", tmp_path / "slim.pt2")
    program = torch.export.load(tmp_path / "slim.pt2")
    x = torch.randn(3, 1, 8, 8)
    here = resolve(str(slim)).model(x)
    torch.testing.assert_close(program.module()(x), here, rtol=1e-4, atol=1e-4)


def test_report_again_with_a_comparison(run: Any, slim: Path, tmp_path: Path) -> None:
    arguments = ["lbyl:digits", "--weights", "shipped", "--method", "none", "--method", "lbyl"]
    (tmp_path / "c.json").write_text(run("compare", *arguments, "--json").stdout)
    run("report", slim, "--comparison", tmp_path / "c.json")
    page = (slim / "report.html").read_text()
    assert "DigitsNet" in page and "lbyl.load(" in page
    run("report", slim, "--out", tmp_path / "plain.html")
    assert len((tmp_path / "plain.html").read_text()) < len(page)


def test_the_original_beside_a_comparison_was_measured_on_the_same_images(
    run: Any, slim: Path, tmp_path: Path
) -> None:
    plan = json.loads((slim / "plan.json").read_text())
    plan["accuracy"] = {"original": 12.5, "slim": 10.0}  # of other images
    (slim / "plan.json").write_text(json.dumps(plan))
    rows = [{"method": "echo", "ratio": r, "accuracy": 90.0} for r in (0.1, 0.5)]
    compared = {"original": {"accuracy": 97.5}, "rows": rows}
    (tmp_path / "c.json").write_text(json.dumps(compared))
    run("report", slim, "--comparison", tmp_path / "c.json")
    page = (slim / "report.html").read_text()
    assert "original 97.5" in page and "original 12.5" not in page


def test_images_of_a_network_match_its_first_batchnorm(run_json: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    plain, matched = tmp_path / "plain.png", tmp_path / "matched.png"
    told = run_json("images", plain, "--count", "4", "--input-size", "1x8x8")
    assert told["shape"] == [1, 8, 8] and image.open(plain).size == (2 * 8 + 2, 2 * 8 + 2)
    network = ["--model", "lbyl:digits", "--weights", "shipped"]
    assert run_json("images", matched, "--count", "4", *network)["shape"] == [1, 8, 8]
    assert plain.read_bytes() != matched.read_bytes()


def test_compare_refined(run_json: Any) -> None:
    arguments = ["lbyl:digits", "--weights", "shipped", "--test", "digits"]
    arguments += ["--ratio", "0.8", "--method", "echo", "--criterion", "l2"]
    plain, told = (run_json("compare", *arguments, *more) for more in ((), ("--refine", "40")))
    assert (plain["refine"], told["refine"]) == (0, 40)
    assert told["rows"][0]["accuracy"] > plain["rows"][0]["accuracy"] + 2


def test_demo(run: Any, run_json: Any) -> None:
    told = run_json("demo")
    accuracy = {trial["method"]: trial["accuracy"] for trial in told["trials"]}
    assert accuracy.keys() == set(lbyl.methods.names())
    assert told["original"] > 98 and accuracy["none"] < 50
    assert accuracy["echo"] > told["original"] - 3
    assert told["after"]["parameters"] < 0.6 * told["before"]["parameters"]
