"""Weights and plan are in place before the report starts, which takes no longer than it may."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lbyl
from lbyl.app.cli.app import app

WORDS = ["lbyl:digits", "--weights", "shipped", "--ratio", "0.5", "--anyway"]

KILLED = """
import sys, time
import lbyl.app.cli.files as files  # private: no network makes a report slow at will
def slow(*args, **kwargs):
    print("reporting", flush=True)
    time.sleep(100)
files.parts = slow
from lbyl.app.cli.app import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_kill_during_the_report_leaves_weights_and_plan(number: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["compress", *WORDS, "--method", "none", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    while b"reporting" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=60)
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "plan.json"]
    assert lbyl.load(out)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def spent(*words: object) -> tuple[str, float]:
    """What a command says, and the seconds that it took."""
    start = time.perf_counter()
    ended = CliRunner().invoke(app, [str(word) for word in words])
    assert ended.exit_code == 0, ended.output
    return ended.stderr, time.perf_counter() - start


def shown(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def test_what_takes_too_long_is_left_out_by_name_and_added_by_the_command_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "my out", tmp_path / "whole"
    spent("compress", *WORDS, "--out", whole)
    with monkeypatch.context() as patch:
        # private: no network makes a report slow at will
        patch.setattr("lbyl.app.cli.files.LEAST", 0.5)

        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(30)

        # private: the same
        patch.setattr("lbyl.app.report.fill.harm", slow)
        told, seconds = spent("compress", *WORDS, "--out", out)
    assert seconds < 30
    assert "which layers hurt most" in shown(out)["left_out"]
    assert "left out of report.html for time: " in told
    page = (out / "report.html").read_text()
    assert "Left out for time" in page and "which layers hurt most" in page
    command = next(line.strip() for line in told.splitlines() if line.startswith("    lbyl"))
    assert command == f"lbyl report '{out}'"
    spent(*shlex.split(command)[1:])
    assert "left_out" not in shown(out)
    page, complete = ((folder / "report.html").read_text() for folder in (out, whole))
    assert "Left out for time" not in page and "Which layers hurt most" in page
    assert page.count("<section") == complete.count("<section")
    assert shown(out).keys() == shown(whole).keys() - {"left_out"}
    assert list(shown(out)["errors"]) == list(shown(whole)["errors"])
    assert shown(out)["further"] == shown(whole)["further"]


def test_a_report_that_cannot_be_completed_says_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spent("compress", *WORDS, "--method", "none", "--out", out)
    document = json.loads((out / "plan.json").read_text())
    document["network"]["weights"] = str(tmp_path / "gone.pth")
    (out / "plan.json").write_text(json.dumps(document))
    (out / "report.json").write_text(json.dumps(shown(out) | {"left_out": ["next step"]}))
    told, _ = spent("report", out)
    assert "next step: left out, for the network before its compression is not here" in " ".join(
        told.split()
    )
    assert "Left out for time" in (out / "report.html").read_text()
