"""inspect, estimate, compare, evaluate, export, report, finetune, images and demo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lbyl
from lbyl.models.resolve import resolve


@pytest.fixture
def slim(run: Any, tmp_path: Path) -> Path:
    """A compressed network of the zoo."""
    out = tmp_path / "slim"
    settings = ["--weights", "shipped", "--ratio", "0.3", "--data", "64", "--no-report"]
    run("compress", "lbyl:digits", *settings, "--out", out)
    return out


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
    assert by_method["echo"]["residual"] is None and by_method["lbyl"]["residual"] > 0
    assert by_method["moments"]["error"] is not None  # data that are given come first
    assert by_method["fold"]["error"] is None  # folding changes the kept channels themselves
    assert by_method["fold"]["criterion"] is None and by_method["lbyl"]["criterion"] == "l1"
    other = run_json("compare", *small, "--method", "echo", "--method", "moments")["rows"]
    assert other[0]["error"] is not None and other[1]["error"] is None  # on other statistics


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "fold", "--criterion", "l1"], "leave --criterion out"),
        (["--method", "none", "--data", "32"], "--data was given"),
        (["--limit", "3"], "--test"),
    ],
)
def test_compare_refuses_what_would_be_ignored(
    run: Any, small: list[str], arguments: list[str], said: str
) -> None:
    result = run("compare", *small, *arguments, code=2)
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_evaluate_a_compressed_directory(run_json: Any, slim: Path) -> None:
    told = run_json("evaluate", slim, "--test", "digits", "--time")
    whole = run_json("evaluate", "lbyl:digits", "--weights", "shipped", "--test", "digits")
    again = run_json("evaluate", "lbyl:digits", "--weights", slim, "--test", "digits")
    assert told["accuracy"] == again["accuracy"] > 90
    assert told["parameters"] < whole["parameters"]
    assert told["seconds"] > 0 and told["images"] == 797


def test_evaluate_needs_something_to_measure(run: Any) -> None:
    assert "--test" in run("evaluate", "lbyl:digits", code=2).stderr


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
    assert "end in .onnx, .pt2" in run("export", slim, "--out", "x.bin", code=2).stderr


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


def test_report_of_nothing(run: Any, tmp_path: Path) -> None:
    assert "no plan.json" in run("report", tmp_path, code=2).stderr


def test_report_of_a_plan_without_its_result(run: Any, slim: Path) -> None:
    plan = json.loads((slim / "plan.json").read_text())
    del plan["result"]["rows"]
    (slim / "plan.json").write_text(json.dumps(plan))
    assert "incomplete: 'rows'" in run("report", slim, code=2).stderr
    del plan["result"]
    (slim / "plan.json").write_text(json.dumps(plan))
    assert "holds no result" in run("report", slim, code=2).stderr


def test_the_report_again_tells_the_same(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = ["--weights", "shipped", "--data", "64", "--test", "digits", "--limit", "100"]
    run("compress", "lbyl:digits", *settings, "--out", out)
    lead = re.compile(r'<p class="lead">.*?</p>')
    before = lead.findall((out / "report.html").read_text())
    run("report", out)
    assert lead.findall((out / "report.html").read_text()) == before != []


def test_finetune_keeps_a_compressed_network_loadable(
    run_json: Any, slim: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    settings = ["--epochs", "1", "--limit", "256", "--device", "cpu", "--out", out]
    told = run_json("finetune", slim, "--train", "digits", "--test", "digits", *settings)
    assert len(told["epochs"]) == 1 and told["after"] > 50
    tuned, before = resolve(str(out)).model, resolve(str(slim)).model
    x = torch.randn(2, 1, 8, 8)
    assert tuned(x).shape == (2, 10) and not torch.equal(tuned(x), before(x))
    assert json.loads((out / "history.json").read_text())["epochs"][0]["epoch"] == 1


def test_finetune_needs_labels(run: Any, small: list[str], tmp_path: Path) -> None:
    images = np.zeros((4, 12, 12, 3), dtype=np.uint8)
    np.savez(tmp_path / "bare.npz", images=images)
    result = run("finetune", *small, "--train", tmp_path / "bare.npz", code=2)
    assert "has no labels" in result.stderr


def test_images(run_json: Any, run: Any, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "sheet.png"
    told = run_json("images", path, "--count", "4", "--input-size", "1x16x16")
    assert told["shape"] == [1, 16, 16]
    assert Image.open(path).size == (2 * 16 + 2, 2 * 16 + 2)
    assert "must end like an image" in run("images", tmp_path / "a.xyz", code=2).stderr


def test_images_of_a_network_match_its_first_batchnorm(
    run_json: Any, run: Any, tmp_path: Path
) -> None:
    plain, matched = tmp_path / "plain.png", tmp_path / "matched.png"
    run_json("images", plain, "--count", "4", "--input-size", "1x8x8")
    network = ["--model", "lbyl:digits", "--weights", "shipped"]
    told = run_json("images", matched, "--count", "4", *network)
    assert told["shape"] == [1, 8, 8]
    assert plain.read_bytes() != matched.read_bytes()
    assert "add --model" in run("images", matched, "--classes", "3", code=2).stderr


def test_compare_refined(run: Any, run_json: Any) -> None:
    arguments = ["lbyl:digits", "--weights", "shipped", "--test", "digits"]
    arguments += ["--ratio", "0.8", "--method", "echo"]
    plain, told = (run_json("compare", *arguments, *more) for more in ((), ("--refine", "40")))
    assert (plain["refine"], told["refine"]) == (0, 40)
    assert told["rows"][0]["accuracy"] > plain["rows"][0]["accuracy"] + 2
    assert "refined by 2 steps" in run("compare", *arguments, "--refine", "2").stdout


def test_demo(run: Any, run_json: Any) -> None:
    told = run_json("demo")
    accuracy = {trial["method"]: trial["accuracy"] for trial in told["trials"]}
    assert accuracy.keys() == set(lbyl.methods.names())
    assert told["original"] > 98 and accuracy["none"] < 50
    assert accuracy["echo"] > told["original"] - 3
    assert told["after"]["parameters"] < 0.6 * told["before"]["parameters"]


def test_the_demos_program_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lbyl.cli.demo import SNIPPET

    monkeypatch.chdir(tmp_path)
    network = resolve("lbyl:digits", "shipped")
    exec(SNIPPET, {"model": network.model, "example_inputs": network.example})
    assert {p.name for p in Path("out").iterdir()} == {"model.safetensors", "plan.json"}
