"""The parts of the retraining benchmark that its figures rest on."""

from __future__ import annotations

import copy
import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from benchmarks.common.jobs import Ledger, matching, run_parallel
from benchmarks.common.results import save_results
from benchmarks.padding import padded
from benchmarks.retraining import initialised, synthesise, with_head
from lbyl.models import zoo
from lbyl.train import TrainConfig, train

pytest.importorskip("accelerate")


def slim_digits() -> nn.Module:
    model, example = zoo.create("digits", "shipped"), torch.zeros(1, 1, 8, 8)
    return lbyl.compress(model, example, {"block.conv1": 0.3}, method="none").model


def test_unused_channels_stay_unused_and_change_nothing() -> None:
    slim = slim_digits()
    wide = padded(slim)
    assert slim.block.conv1.out_channels == 44
    assert wide.block.conv1.out_channels == wide.block.conv2.in_channels == 48
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(96, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (96,), generator=generator)
    config = TrainConfig(epochs=3, batch_size=32, learning_rate=0.05, augment=False)
    losses = [
        [
            row["train_loss"]
            for row in train(m, (images, labels), None, config, progress=False, cpu=True)
        ]
        for m in (slim, wide)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert not wide.block.conv1.weight[44:].any()
    assert not wide.block.conv2.weight[:, 44:].any()
    assert torch.allclose(wide.block.conv1.weight[:44], slim.block.conv1.weight, atol=1e-4)


def test_a_ledger_keeps_runs_apart_and_takes_them_over(tmp_path: Path) -> None:
    ledger = Ledger("work", {"epochs": 2}, tmp_path)
    ledger.checkpoints("0.5/echo").mkdir(parents=True)
    ledger.store("0.5/echo", {"final": 1.0})
    assert not ledger.checkpoints("0.5/echo").exists()
    assert ledger.refresh(["0.5/none", "0.5/echo"])
    assert not ledger.refresh(["0.5/none", "0.5/echo"])
    content = ledger.to_dict(["0.5/none", "0.5/echo"])
    assert content["runs"] == {"0.5/echo": {"final": 1.0}}
    path = save_results("work", content, folder=tmp_path / "results")
    again = Ledger("work", {"epochs": 2}, tmp_path / "elsewhere")
    again.adopt(path)
    assert again.runs == content["runs"]
    assert again.environment == content["environment"]
    other = Ledger("work", {"epochs": 3}, tmp_path)
    other.adopt(path)
    assert not other.runs
    assert not other.refresh(["0.5/echo"])
    assert matching(["0.5/echo", "0.3/echo", "0.3/none"], "0.5/*,*/none") == [
        "0.5/echo",
        "0.3/none",
    ]
    with pytest.raises(SystemExit, match="no setting"):
        matching(["0.5/echo"], "echo")


def _store(ledger: Ledger, key: str) -> None:
    if key == "bad":
        raise ValueError("a setting that fails")
    ledger.store(key, {"key": key})


def test_settings_run_side_by_side_and_failures_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("joblib")
    ledger, finished = Ledger("work", {}, tmp_path), list[int]()
    keys = ["one", "bad", "two"]
    failed = run_parallel(
        functools.partial(_store, ledger), keys, 2, None, lambda: finished.append(1)
    )
    assert failed == ["bad"]
    assert len(finished) == 3
    assert ledger.refresh(keys)
    assert ledger.to_dict(keys)["runs"] == {"one": {"key": "one"}, "two": {"key": "two"}}
    assert "a setting that fails" in capsys.readouterr().err


def test_time_that_is_up_leaves_what_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("joblib")
    start = time.monotonic()
    assert run_parallel(_sleep, ["60"], 1, 3.0) == []
    assert time.monotonic() - start < 30
    assert "time is up: 1 settings" in capsys.readouterr().out


def _sleep(key: str) -> None:
    time.sleep(float(key))


def test_heads_and_beginnings() -> None:
    model = slim_digits()
    before = copy.deepcopy(model.state_dict())
    changed, fresh = with_head(model, 7), initialised(model)
    assert changed(torch.zeros(2, 1, 8, 8)).shape == (2, 7)
    assert [p.shape for p in fresh.parameters()] == [p.shape for p in model.parameters()]
    assert not torch.equal(fresh.fc.weight, model.fc.weight)
    assert torch.equal(fresh.fc.weight, initialised(model).fc.weight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_network_describes_images_of_its_own() -> None:
    model: Any = zoo.create("digits", "shipped")
    images, labels = synthesise(model, zoo.info("digits"), 40, steps=8, batch=32)
    assert images.shape == (40, 1, 8, 8)
    assert torch.allclose(labels.sum(1), torch.ones(40), atol=1e-5)
    assert len(labels.argmax(1).unique()) > 5
