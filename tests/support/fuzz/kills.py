"""Processes that are killed while they write, and what must be found afterwards.

A process forks off one that has torch loaded already, so that its whole life is the work itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lbyl
from benchmarks.training import TrainConfig, train
from lbyl.app.sources import zoo
from support import quick
from support.networks import build, example

LONGEST = 120  # seconds that any work may take


@dataclass(frozen=True)
class Work:
    """Something that writes into a folder, and what its folder must be like at any moment."""

    start: Callable[[Path], None]  # the old files
    run: Callable[[Path], None]  # the new ones
    check: Callable[[Path], None]


def in_fork(run: Callable[[Path], None], folder: Path, after: float | None = None) -> int:
    """The exit status of a process that does the work, killed so many seconds after its start."""
    process = os.fork()
    if process == 0:
        status = 1
        torch.set_num_threads(1)  # a fork has no other threads, and would wait for them for ever
        try:
            with (
                Path(os.devnull).open("w") as nowhere,
                redirect_stdout(nowhere),
                redirect_stderr(nowhere),
            ):
                run(folder)
            status = 0
        finally:
            os._exit(status)
    if after is not None:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError(f"the work did not end within {LONGEST} s")


def seconds_of(work: Work, folder: Path) -> float:
    """How long the work takes when nobody interrupts it; the folder must be right afterwards."""
    work.start(folder)
    start = time.perf_counter()
    assert in_fork(work.run, folder) == 0, "the work fails by itself"
    taken = time.perf_counter() - start
    work.check(folder)
    return taken


def kill_at(work: Work, folder: Path, moment: float) -> bool:
    """Kill the work at a moment; whether it was still at it. The folder is checked, then redone."""
    work.start(folder)
    killed = in_fork(work.run, folder, moment) != 0
    work.check(folder)
    assert in_fork(work.run, folder) == 0, "what was left behind stands in the way of another run"
    work.check(folder)
    return killed


# Saving -----------------------------------------------------------------------------------------


def _outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(example("chain"))


def saving() -> Work:
    """One result over another, many times."""
    results = [
        quick.compress(build("chain"), example("chain"), r, criterion="l2") for r in (0.2, 0.6)
    ]
    outputs = [_outputs(result.model) for result in results]

    def run(folder: Path) -> None:
        for turn in range(20):
            lbyl.save(results[turn % 2], folder / "out")

    def check(folder: Path) -> None:
        found = _outputs(lbyl.load(folder / "out", build("chain", 7)))
        assert any(torch.equal(found, y) for y in outputs), "neither the old nor the new network"

    return Work(lambda folder: lbyl.save(results[1], folder / "out") and None, run, check)


# Commands ---------------------------------------------------------------------------------------


def command(*arguments: str) -> None:
    """The program, as the shell would call it."""
    from lbyl.app.cli.app import app

    app(list(arguments), prog_name="lbyl", standalone_mode=False)


def compressing() -> Work:
    """`lbyl compress` into a directory that holds another network."""

    def compress(folder: Path, ratio: float) -> None:
        options = ("--weights", "shipped", "--method", "none", "--ratio", str(ratio), "--no-report")
        command("compress", "lbyl:digits", *options, "--out", str(folder / "out"))

    def start(folder: Path) -> None:
        if not (folder / "out").exists():
            in_fork(lambda where: compress(where, 0.25), folder)

    def check(folder: Path) -> None:
        model = lbyl.load(folder / "out", zoo.create("digits"))
        with torch.no_grad():
            assert bool(model.eval()(torch.zeros(1, 1, 8, 8)).isfinite().all())

    return Work(start, lambda folder: compress(folder, 0.5), check)


def sweeping() -> Work:
    """`lbyl sweep` of some rows, which another run goes on with."""

    def run(folder: Path) -> None:
        options = ("--weights", "shipped", "--method", "none", "--ratio", "0.2", "--ratio", "0.5")
        command("sweep", "lbyl:digits", "--jobs", "1", *options, "--out", str(folder / "rows.db"))

    def check(folder: Path) -> None:
        if (folder / "rows.db").exists():
            with sqlite3.connect(folder / "rows.db") as rows:
                assert rows.execute("pragma integrity_check").fetchone() == ("ok",)

    return Work(lambda folder: (folder / "rows.db").unlink(missing_ok=True), run, check)


# Training ---------------------------------------------------------------------------------------

EPOCHS = 4


def _learner() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def _learn(folder: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train on, or from the beginning where there is no checkpoint; the state at the end."""
    images = torch.arange(32 * 12.0).reshape(32, 3, 2, 2).sin()
    config = TrainConfig(epochs=epochs, batch_size=8, augment=False)
    model, out = _learner(), folder / "run"
    resume = any(out.glob("checkpoint-*/state.json"))
    pair = (images, torch.arange(32) % 3)
    train(model, pair, config=config, out=out, resume=resume, progress=False, cpu=True)
    return model.state_dict()


def training() -> Work:
    """Fine-tuning that is killed and resumed ends with the weights of one that was not."""
    whole: dict[str, Tensor] = {}

    def run(folder: Path) -> None:
        save_file(_learn(folder), folder / "part")
        (folder / "part").replace(folder / "weights")

    def start(folder: Path) -> None:
        shutil.rmtree(folder / "run", ignore_errors=True)
        (folder / "weights").unlink(missing_ok=True)

    def check(folder: Path) -> None:
        for state in sorted((folder / "run").glob("checkpoint-*/state.json"))[-1:]:
            assert len(json.loads(state.read_text())["history"]) <= EPOCHS
            load_file(state.parent / "model.safetensors")
            load_file(state.parent / "optimizer.safetensors")
        if (folder / "weights").exists():
            found = load_file(folder / "weights")
            if not whole:
                whole.update(found)
            assert all(torch.equal(found[name], whole[name]) for name in whole)

    return Work(start, run, check)


WORKS: dict[str, Callable[[], Work]] = {
    "save": saving,
    "compress": compressing,
    "fine-tune": training,
    "sweep": sweeping,
}
