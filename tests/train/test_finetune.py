"""`lbyl finetune`: it learns, it goes on exactly where it was, and it says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import lbyl
from lbyl.app.cli.app import app

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")
DIGITS = ["--train", "digits", "--batch-size", "64", "--device", "cpu"]


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`slim`, whose accuracy pruning has cost, and `tuned`, which was trained since."""
    folder = tmp_path_factory.mktemp("finetune")
    plain = ["--weights", "shipped", "--ratio", "0.5", "--method", "none", "--no-report"]
    run("compress", "lbyl:digits", *plain, "--out", folder / "slim")
    training = [*DIGITS, "--test", "digits", "--epochs", "2", "--out", folder / "tuned", "--json"]
    told = json.loads(run("finetune", folder / "slim", *training).stdout)
    (folder / "told.json").write_text(json.dumps(told))
    return folder


def test_training_gives_back_what_pruning_cost_and_stays_a_directory_to_load(folder: Path) -> None:
    told = json.loads((folder / "told.json").read_text())
    assert told["before"] < 50 and told["after"] > 88
    first, last = (epoch["train_loss"] for epoch in told["epochs"])
    assert last < 0.5 * first
    history = json.loads((folder / "tuned" / "history.json").read_text())
    assert history["epochs"] == told["epochs"] and history["epochs"][1]["epoch"] == 2
    tuned, before = lbyl.load(folder / "tuned"), lbyl.load(folder / "slim")
    assert [p.shape for p in tuned.parameters()] == [p.shape for p in before.parameters()]
    assert not tuned.training and not torch.equal(tuned.fc.weight, before.fc.weight)
    scored = run("evaluate", folder / "tuned", "--test", "digits", "--json")
    assert json.loads(scored.stdout)["accuracy"] == told["after"]
    files = (p.suffix for p in (folder / "tuned").rglob("*") if p.is_file())
    assert set(files) == {".safetensors", ".json"}  # nothing that anybody has to trust


def test_what_was_measured_before_training_is_told_no_longer_and_the_plans_compose(
    folder: Path, tmp_path: Path
) -> None:
    plan = json.loads((folder / "tuned" / "plan.json").read_text())
    assert plan["result"]["forecast"] is None and plan["accuracy"].keys() == {"slim"}
    run("report", folder / "tuned", "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Trained for 2 epochs afterwards." in page and "No training." not in page
    again = ["--ratio", "0.25", "--method", "none", "--no-report", "--out", tmp_path / "again"]
    run("compress", folder / "tuned", *again)
    whole = json.loads((tmp_path / "again" / "plan.json").read_text())
    assert len(whole["earlier"]) == 2 and whole["units"]["stem.0"]["channels"] == 32
    assert set(whole["units"]["stem.0"]["kept"]) < set(plan["units"]["stem.0"]["kept"])


def test_a_run_that_was_interrupted_ends_with_the_very_weights_of_one_that_was_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = ["finetune", folder / "slim", *DIGITS, "--limit", "192", "--epochs", "3"]
    run(*training, "--out", tmp_path / "whole")
    steps, step = [], torch.optim.SGD.step

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        if len(steps) == 8:  # in the last of three epochs of three batches
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", interrupted)
        run(*training, "--out", tmp_path / "cut", code=130)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    torch.rand(17)  # the state of the global generator must not matter
    run(*training, "--out", tmp_path / "cut", "--resume")
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    told = [json.loads((tmp_path / name / "history.json").read_text()) for name in ("whole", "cut")]
    for ours, theirs in zip(*(history["epochs"] for history in told), strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    assert "is there already" in run(*training, "--out", tmp_path / "cut", code=2).stderr
    other = [*training, "--learning-rate", "0.2", "--out", tmp_path / "cut", "--resume"]
    assert "learning_rate was 0.01, is 0.2" in run(*other, code=2).stderr
    for file in (tmp_path / "cut").rglob("optimizer.safetensors"):
        file.write_bytes(b"not tensors")
    again = [*training, "--out", tmp_path / "cut", "--resume"]
    assert "cannot be resumed" in run(*again, code=2).stderr


def test_mistakes_are_one_line(folder: Path, tmp_path: Path) -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    np.savez(tmp_path / "bare.npz", images=images)
    np.savez(tmp_path / "eleven.npz", images=images, labels=np.array([0, 1, 2, 11]))
    for arguments, said in (
        (["--train", tmp_path / "bare.npz"], "has no labels"),
        (["--train", tmp_path / "eleven.npz"], "10 classes"),
        ([*DIGITS, "--limit", "64", "--resume"], "nothing to resume"),
        ([*DIGITS, "--limit", "640", "--learning-rate", "1e30"], "lower the learning rate"),
        ([*DIGITS, "--mixed-precision", "fp4"], "mixed_precision"),
    ):
        shown = run("finetune", folder / "slim", *arguments, "--out", tmp_path / "out", code=2)
        assert said in shown.stderr.strip().splitlines()[-1]
