"""`lbyl compress`: what it writes, says and refuses."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lbyl
from lbyl.app.sources import resolve

IMAGES = ["--data", "32"]


def labelled(path: Path, count: int = 40, size: int = 12, classes: int = 5) -> str:
    """Random images with labels in an .npz file."""
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (count, size, size, 3), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(count) % classes)
    return str(path)


def test_writes_what_python_loads_back(run: Any, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = run("compress", *small, *IMAGES, "--ratio", "0.5", "--quiet", "--out", out)
    assert told.stdout == "" and told.stderr == ""
    written = {"model.safetensors", "plan.json", "report.html", "report.json"}
    assert {p.name for p in out.iterdir()} == written
    network = resolve(small[0], input_shape=(12,))
    here = lbyl.compress(network.model, network.example, 0.5, data=32).model
    loaded = lbyl.load(out, resolve(small[0], input_shape=(12,)).model)
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(loaded(x), here(x))


def test_the_story_is_told(run: Any, small: list[str], tmp_path: Path) -> None:
    data = labelled(tmp_path / "data.npz")
    out = tmp_path / "out"
    result = run("compress", *small, *IMAGES, "--test", data, "--out", out)
    assert re.search(r"parameters +2\.18 k +1\.\d\d k +-\d\d\.\d %", result.stdout)
    assert re.search(r"accuracy +\d+\.\d\d % +\d+\.\d\d %", result.stdout)
    assert "model = lbyl.load(" in result.stdout
    assert re.search(r"echo after \S+.*, on procedural statistics", result.stdout)
    assert re.search(r"\d+ of 28 channels pruned, in 2 layers", result.stdout)
    assert "✓ tracing" in result.stderr and "✓ compressing" in result.stderr
    assert json.loads((out / "plan.json").read_text())["accuracy"].keys() == {"original", "slim"}


def test_json_holds_everything(run_json: Any, small: list[str]) -> None:
    told = run_json("compress", *small, *IMAGES, "--ratio", "0.25")
    kept = {row["unit"]: (row["channels"], row["kept"]) for row in told["rows"]}
    assert kept == {"0": (12, 9), "3": (16, 12)}
    assert told["after"]["parameters"] < told["before"]["parameters"]
    assert told["method"]["name"] == "echo" and told["accuracy"] is None
    assert told["data"] == "procedural" and told["criterion"]["name"] in lbyl.criteria.names()
    assert told["corrections"]["rewritten"] == 2 and told["refinement"] is None
    assert all(0 < row["error"] < 1 for row in told["rows"])


def test_ratios_by_pattern_and_options_of_the_method(run_json: Any, small: list[str]) -> None:
    settings = ["--method", "lbyl", "--option", "lambda1=0", "--option", "variant=released"]
    told = run_json("compress", *small, "--ratio", "0.5", "--ratio", "3=0.25", *settings)
    assert [row["kept"] for row in told["rows"]] == [6, 12]
    assert told["method"]["name"] == "lbyl" and told["method"]["variant"] == "released"
    assert told["data"] is None and told["corrections"]["mean"] == 0
    assert all(row["error"] is None for row in told["rows"])


def test_layers_can_be_excluded_and_rounded(run_json: Any, small: list[str]) -> None:
    choice = ["--method", "none", "--ratio", "0.5", "--exclude", "0", "--multiple-of", "5"]
    told = run_json("compress", *small, *choice)
    assert [(row["unit"], row["kept"]) for row in told["rows"]] == [("3", 10)]
    assert "exclude" in told["unprunable"]["0"]
    only = run_json("compress", *small, "--method", "none", "--include", "0")
    assert [row["unit"] for row in only["rows"]] == ["0"]


def test_a_budget_instead_of_a_ratio(run_json: Any, small: list[str]) -> None:
    told = run_json("compress", *small, *IMAGES, "--macs", "0.6")
    assert told["after"]["macs"] <= 0.6 * told["before"]["macs"]


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


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError("no space left")


def test_a_failure_leaves_the_old_directory(
    run: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run("compress", *small, "--method", "none", "--no-report", "--out", out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    settings = ["--method", "none", "--ratio", "0.6", "--no-report"]
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", full)  # as plan.json is written
        result = run("compress", *small, *settings, "--out", out, code=1)
    assert "no space left" in result.stderr
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_report_that_fails_leaves_the_new_weights_and_the_plan(
    run: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run("compress", *small, "--method", "none", "--out", out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    with monkeypatch.context() as patch:
        patch.setattr("jinja2.Environment.get_template", full)
        settings = ["--method", "none", "--ratio", "0.6"]
        told = run("compress", *small, *settings, "--out", out)
    assert "no report.html: no space left" in told.stderr
    assert not (out / "report.html").exists()  # the earlier one was of another network
    assert (out / "model.safetensors").read_bytes() != before["model.safetensors"]
    command = next(line for line in told.stderr.splitlines() if line.strip().startswith("lbyl "))
    run(*shlex.split(command)[1:])
    assert (out / "report.html").is_file()


def test_without_jinja_there_is_no_report_but_a_note(
    run: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = run("compress", *small, "--method", "none", "--out", tmp_path / "out")
    assert "pip install 'lbyl[report]'" in result.stderr
    assert not (tmp_path / "out" / "report.html").exists()


def test_the_corrections_are_those_asked_for(run_json: Any, small: list[str]) -> None:
    counts = {}
    for name in ("none", "mean", "mean+variance", "recalibrate"):
        told = run_json("compress", *small, *IMAGES, "--correction", name)
        assert told["method"]["correction"] == name
        done = told["corrections"]
        counts[name] = [done[key] > 0 for key in ("mean", "variance", "recalibrated")]
    assert counts["none"] == [False, False, False]
    assert counts["mean"] == [True, False, False]
    # the consumers of this network have no BatchNorm behind them, so no variance is put back
    assert counts["recalibrate"][0] and counts["recalibrate"][2]


def test_own_images_are_used(run_json: Any, small: list[str], tmp_path: Path) -> None:
    data = labelled(tmp_path / "data.npz")
    told = run_json("compress", *small, "--data", data)
    plain = run_json("compress", *small, *IMAGES)
    analytic = run_json("compress", *small, "--data", "analytic")
    assert [f["data"] for f in (told, plain, analytic)] == [
        "own and procedural",
        "procedural",
        "analytic",
    ]
    recalibrated = [f["corrections"]["recalibrated"] > 0 for f in (told, plain, analytic)]
    assert recalibrated == [True, True, False]  # nothing is run for what the weights tell
    assert told["rows"][0]["error"] != plain["rows"][0]["error"]


def test_refinement_is_done_and_told(
    run: Any, run_json: Any, small: list[str], tmp_path: Path
) -> None:
    data, out = labelled(tmp_path / "data.npz"), tmp_path / "out"
    result = run("compress", *small, *IMAGES, "--refine", "4", "--out", out)
    told = json.loads((out / "plan.json").read_text())["result"]["refinement"]
    assert told["asked"] == 4 and told["steps"] in (0, 4)
    words = "refined by 4 steps" if told["steps"] else "refinement taken back"
    assert words in result.stdout
    report = (out / "report.html").read_text()
    assert words in report and "No training" not in report
    run("report", out, "--model", small[0])
    assert words in (out / "report.html").read_text()
    own = run_json("compress", *small, "--data", data, "--refine", "4")
    assert own["refinement"]["asked"] == 4 and own["seconds"]["refine"] > 0


def test_layers_kept_whole_are_not_counted_as_pruned(
    run: Any, small: list[str], tmp_path: Path
) -> None:
    choice = ["--method", "none", "--ratio", "0=0.5", "--out", tmp_path / "out"]
    shown = run("compress", *small, *choice).stdout
    assert "6 of 28 channels pruned, in 1 layer" in shown
    report = (tmp_path / "out" / "report.html").read_text()
    assert "Kept whole" in report and report.count('<th scope="row">') == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratio", "much"], "write 0.3"),
        (["--ratio", "1.5"], "below 1"),
        (["--ratio", "0.1", "--ratio", "0.2"], "given twice"),
        (["--onnx"], "--out"),
        (["--option", "strength=3"], "the settings of echo are"),
        (["--option", "ridge=often"], "float is expected"),
        (["--macs", "-1"], "above 0 and at most 1"),
        (["--macs", "2"], "above 0 and at most 1"),
        (["--ratio", "0.3", "--macs", "0.5"], "--ratio and --macs both"),
        (["--macs", "0.5", "--max-error", "0.1"], "--macs and --max-error are several"),
        (["--method", "fold", "--criterion", "l1"], "--criterion has no say"),
        (["--method", "none", "--data", "32"], "--data was given"),
        (["--method", "none", "--data", "own.npz"], "no file or folder"),
        (["--data", "invertion"], "procedural, inversion, analytic"),
        (["--data", "1"], "at least 2 images"),
        (["--option", "ridge=0", "--option", "ridge=1"], "given twice"),
        (["--option", "correction=mean", "--correction", "mean"], "give one"),
        (["--correction", "magic"], "unknown correction"),
        (["--method", "magic"], "the known ones are"),
        (["--criterion", "magic"], "the known ones are"),
        (["--limit", "5"], "--test"),
        (["--device", "toaster"], "cpu, cuda"),
        (["--mean", "a,b"], "numbers between commas"),
        (["--bogus"], "No such option"),
    ],
)
def test_usage_errors(run: Any, small: list[str], arguments: list[str], said: str) -> None:
    result = run("compress", *small, *arguments, code=2)
    assert said in result.stderr and result.stdout == ""
    assert result.stderr.count("\n") == 1  # nothing was done before, or it would be told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratio", "nothing.*=0.5"], "nothing.*"),
        (["--exclude", "nothing.*"], "nothing.*"),
        (["--include", "nothing.*"], "nothing.*"),
        (["--weights", "missing.pth"], "no weights file"),
        (["--test", "missing.npz"], "no file or folder"),
        (["--option", "sequential=true"], "--data"),
    ],
)
def test_what_does_not_fit_is_one_line_and_code_2(
    run: Any, small: list[str], arguments: list[str], said: str
) -> None:
    result = run("compress", *small, *arguments, "--quiet", code=2)
    assert said in result.stderr and result.stdout == "" and result.stderr.count("\n") == 1


def test_a_file_in_the_way_is_said_before_any_work(
    run: Any, small: list[str], tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("")
    for command, place in (("compress", "out"), ("compress", "out/x"), ("export", "out/x")):
        result = run(command, *small, "--out", tmp_path / place, code=2)
        assert "is a file" in result.stderr and "✓" not in result.stderr


def test_output_into_the_working_directory(
    run: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("model.onnx").write_text("out of date")
    run("compress", *small, "--method", "none", "--no-report", "--out", ".")
    assert sorted(p.name for p in Path().iterdir()) == ["model.safetensors", "plan.json"]
