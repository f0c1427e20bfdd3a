"""`lbyl compress`: what it writes, says and refuses."""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lbyl
from lbyl.models import resolve

IMAGES = ["--images", "32"]


def labelled(path: Path, count: int = 40, size: int = 12, classes: int = 5) -> str:
    """Random images with labels in an .npz file."""
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (count, size, size, 3), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(count) % classes)
    return str(path)


def test_writes_what_python_loads_back(run: Any, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("compress", *small, *IMAGES, "--ratio", "0.5", "--out", out)
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "plan.json", "report.html"}
    network = resolve(small[0], input_shape=(12,))
    here = lbyl.compress(network.model, network.example, 0.5, images=32).model
    loaded = lbyl.load(out, resolve(small[0], input_shape=(12,)).model)
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(loaded(x), here(x))


def test_the_story_is_told(run: Any, small: list[str], tmp_path: Path) -> None:
    data = labelled(tmp_path / "data.npz")
    out = tmp_path / "out"
    result = run("compress", *small, *IMAGES, "--data", data, "--out", out)
    assert re.search(r"parameters +2\.18 k +1\.\d\d k +-\d\d\.\d %", result.stdout)
    assert re.search(r"accuracy +\d+\.\d\d % +\d+\.\d\d %", result.stdout)
    assert "model = lbyl.load(" in result.stdout
    assert "✓ following its channels" in result.stderr
    assert json.loads((out / "plan.json").read_text())["accuracy"].keys() == {"original", "slim"}


def test_json_holds_everything(run_json: Any, small: list[str]) -> None:
    found = run_json("compress", *small, *IMAGES, "--ratio", "0.25")
    kept = {row["unit"]: (row["channels"], row["kept"]) for row in found["rows"]}
    assert kept == {"0": (12, 9), "3": (16, 12)}
    assert found["after"]["parameters"] < found["before"]["parameters"]
    assert found["method"] == "echo" and found["accuracy"] is None


def test_quiet_prints_nothing(run: Any, small: list[str], tmp_path: Path) -> None:
    result = run("compress", *small, *IMAGES, "--quiet", "--out", tmp_path / "out")
    assert result.stdout == "" and result.stderr == ""
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_ratios_by_pattern_and_options_of_the_method(run_json: Any, small: list[str]) -> None:
    settings = ["--method", "lbyl", "--option", "lambda1=0", "--option", "variant=released"]
    found = run_json("compress", *small, "--ratio", "0.5", "--ratio", "3=0.25", *settings)
    assert [row["kept"] for row in found["rows"]] == [6, 12]
    assert found["method"] == "lbyl" and found["repair"] == "none"


def test_layers_can_be_skipped_and_rounded(run_json: Any, small: list[str]) -> None:
    choice = ["--method", "none", "--ratio", "0.5", "--skip", "0", "--round-to", "5"]
    found = run_json("compress", *small, *choice)
    assert [(row["unit"], row["kept"]) for row in found["rows"]] == [("3", 10)]
    assert found["left_alone"]["0"] == "skipped as asked"


def test_a_budget_instead_of_a_ratio(run_json: Any, small: list[str]) -> None:
    found = run_json("compress", *small, *IMAGES, "--macs", "0.6")
    assert found["after"]["macs"] <= 0.6 * found["before"]["macs"]


def test_a_second_run_replaces_cleanly(run: Any, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("compress", *small, "--method", "none", "--out", out)
    (out / "mine.txt").write_text("kept")
    (out / "model.onnx").write_text("out of date")
    run("compress", *small, "--method", "none", "--ratio", "0.5", "--out", out, "--no-report")
    names = {p.name for p in out.iterdir()}
    assert names == {"model.safetensors", "plan.json", "mine.txt"}
    rows = json.loads((out / "plan.json").read_text())["result"]["rows"]
    assert [row["kept"] for row in rows] == [6, 8]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_failure_leaves_the_old_directory(
    run: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run("compress", *small, "--method", "none", "--out", out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("lbyl.report.write_report", full)
    settings = ["--method", "none", "--ratio", "0.6"]
    result = run("compress", *small, *settings, "--out", out, code=1)
    assert "no space left" in result.stderr
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_without_jinja_there_is_no_report_but_a_note(
    run: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util as util

    find = util.find_spec
    monkeypatch.setattr(
        "lbyl.cli.files.importlib.util.find_spec",
        lambda name, *rest: None if name == "jinja2" else find(name, *rest),
    )
    result = run("compress", *small, "--method", "none", "--out", tmp_path / "out")
    assert "pip install 'lbyl[report]'" in result.stderr
    assert not (tmp_path / "out" / "report.html").exists()


def test_calibration_images_are_used(run_json: Any, small: list[str], tmp_path: Path) -> None:
    data = labelled(tmp_path / "data.npz")
    found = run_json("compress", *small, "--calibration", data)
    plain = run_json("compress", *small, *IMAGES)
    assert "running it on your images" in found["stages"]
    assert "running it on procedural images" in plain["stages"]
    assert found["rows"][0]["norm"] != plain["rows"][0]["norm"]


def test_refinement_is_done_and_told(
    run: Any, run_json: Any, small: list[str], tmp_path: Path
) -> None:
    data, out = labelled(tmp_path / "data.npz"), tmp_path / "out"
    result = run("compress", *small, *IMAGES, "--refine", "4", "--out", out)
    assert "refined by 4 steps" in result.stdout
    report = (out / "report.html").read_text()
    assert "refined by <b>4</b> steps" in report and "No training" not in report
    assert json.loads((out / "plan.json").read_text())["result"]["refine"] == 4
    run("report", out, "--model", small[0])
    assert "refined by <b>4</b> steps" in (out / "report.html").read_text()
    own = run_json("compress", *small, "--calibration", data, "--refine", "4")
    assert own["refine"] == 4 and own["seconds"]["refine"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratio", "much"], "write 0.3"),
        (["--ratio", "1.5"], "below 1"),
        (["--ratio", "0.1", "--ratio", "0.2"], "given twice"),
        (["--onnx"], "--out"),
        (["--option", "strength=3"], "the settings of echo are"),
        (["--option", "ridge=often"], "float is expected"),
        (["--macs", "-1"], "more than 0"),
        (["--device", "toaster"], "cpu, cuda"),
        (["--mean", "a,b"], "numbers between commas"),
        (["--bogus"], "No such option"),
    ],
)
def test_usage_errors(run: Any, small: list[str], arguments: list[str], said: str) -> None:
    result = run("compress", *small, *arguments, code=2)
    assert said in result.stderr and result.stdout == ""
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "magic"], "the known ones are"),
        (["--criterion", "magic"], "the known ones are"),
        (["--repair", "magic"], "unknown repair"),
        (["--ratio", "nothing.*=0.5"], "no prunable layer is named like"),
        (["--weights", "missing.pth"], "no weights file"),
        (["--data", "missing.npz"], "no file or folder"),
    ],
)
def test_failures(run: Any, small: list[str], arguments: list[str], said: str) -> None:
    result = run("compress", *small, *arguments, "--quiet", code=1)
    assert said in result.stderr and result.stdout == ""
    assert result.stderr.count("\n") == 1


def test_a_file_in_the_way_is_said_before_any_work(
    run: Any, small: list[str], tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("")
    result = run("compress", *small, "--out", tmp_path / "out", code=2)
    assert "is a file" in result.stderr and "✓" not in result.stderr


@pytest.mark.slow
def test_the_newcomers_way(program: Any, shared: Path, tmp_path: Path) -> None:
    """MobileNetV2 in one command, no data; its processor time alone must stay under 3 minutes."""
    weights = shared / "models" / "mobilenet_v2_imagenet.safetensors"
    name, out = "torchvision:mobilenet_v2", tmp_path / "out"
    start, before = time.perf_counter(), _processor()
    arguments = [name, "--weights", weights, "--ratio", "0.3", "--out", out, "--onnx", "--json"]
    done = program("compress", *arguments)
    wall, spent = time.perf_counter() - start, _processor() - before
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"\n{wall:.0f} s on the clock, {spent:.0f} s of processor, stages {found['stages']}")
    assert spent < 180
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "model.onnx").stat().st_size > 1_000_000 and found["onnx_error"] < 1e-3
    assert found["after"]["macs"] < 0.75 * found["before"]["macs"]
    network = resolve(name, weights)
    here = lbyl.compress(network.model, network.example, 0.3, round_to=8)  # as for ONNX
    loaded = lbyl.load(out, resolve(name).model)
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), here.model(x), rtol=1e-3, atol=1e-3)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_output_into_the_working_directory(
    run: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("model.onnx").write_text("out of date")
    run("compress", *small, "--method", "none", "--no-report", "--out", ".")
    assert sorted(p.name for p in Path().iterdir()) == ["model.safetensors", "plan.json"]
