"""The program in a real terminal: tables of any width, bars that move, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from lbyl.app.cli.app import app

pytest.importorskip("pty", reason="Windows has no terminals of this kind")
import fcntl
import termios

DIGITS = ["lbyl:digits", "--weights", "shipped"]
Run = Callable[..., str]


def open_terminal(width: int) -> tuple[int, int]:
    """Both ends of a terminal so many columns wide."""
    screen, keyboard = os.openpty()
    fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    return screen, keyboard


def read_all(screen: int) -> bytes:
    """What is shown until the last program closes the terminal."""
    shown = b""
    while True:
        try:
            more = os.read(screen, 4096)
        except OSError:  # Linux says so where others say nothing more comes
            more = b""
        if not more:
            return shown
        shown += more


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process with a terminal for its output; what it showed."""
    monkeypatch.setenv("TERM", "xterm-256color")

    def invoke(*arguments: object, width: int = 80) -> str:
        screen, keyboard = open_terminal(width)
        shown: list[bytes] = []
        reader = threading.Thread(target=lambda: shown.append(read_all(screen)))
        reader.start()
        with monkeypatch.context() as patch, os.fdopen(keyboard, "w") as stream:
            patch.setenv("COLUMNS", str(width))  # else the width of this process's own is taken
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            app([str(a) for a in arguments], standalone_mode=False)
        reader.join()
        os.close(screen)
        return shown[0].decode()

    return invoke


def plain(shown: str) -> str:
    """The same without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def lines(shown: str) -> list[str]:
    """Lines as they stand on the screen, without what was written over."""
    return [line.rpartition("\r")[2] for line in plain(shown).replace("\r\n", "\n").split("\n")]


@pytest.mark.parametrize("width", [60, 120])
def test_inspect_names_every_layer_in_a_terminal_of_any_width(terminal: Run, width: int) -> None:
    shown = lines(terminal("inspect", "lbyl:resnet20_cifar10", width=width))
    layers = [f"layer{i}.{j}.conv1" for i in (1, 2, 3) for j in (0, 1, 2)]
    table = [line for line in shown if line.startswith("  layer") and line.split()[0] in layers]
    assert [line.split()[0] for line in table] == layers
    assert max(map(cell_len, table)) <= width


def test_compare_names_every_method_in_a_terminal_of_80_columns(terminal: Run) -> None:
    methods = ["none", "neuron-merging"]
    asked = [word for name in methods for word in ("--method", name)]
    shown = lines(terminal("compare", *DIGITS, "--ratio", "0.3", *asked))
    table = [line for line in shown if re.match(r" +\S+ +0\.3 ", line)]
    assert [line.split()[0] for line in table] == methods
    assert all(cell_len(line) <= 80 for line in table)
    heads = next(line.split() for line in shown if line.strip().startswith("method"))
    assert heads == "method ratio keeps about parameters MACs error time".split()


def test_sentences_break_between_words_and_programs_stay_whole(
    terminal: Run, tmp_path: Path
) -> None:
    out = tmp_path / ("a" * 70)
    plain = ["--ratio", "*=0.3", "--criterion", "l2", "--method", "none", "--no-report"]
    shown = terminal("compress", *DIGITS, *plain, "--out", out, width=60)
    told = lines(shown)
    first = next(i for i, line in enumerate(told) if line.startswith("forecast: "))
    assert max(map(cell_len, told[first : first + 2])) <= 60
    assert re.search(r"\d+ % equal answers on \d+ fresh inputs", " ".join(told[first : first + 2]))
    assert f'    model = lbyl.load("{out}")' in told


def test_a_long_command_shows_what_it_does_while_it_does_it(terminal: Run) -> None:
    shown = terminal("compress", *DIGITS, "--ratio", "*=0.5", "--criterion", "l2", "--data", "64")
    assert re.search(r"collect\w* [^\n]*[━╺]", plain(shown))
    assert "compressing" in shown and "✓" in shown


ENDLESS = ["--ratio", "0.5", "--refine", "100000", "--data", "64"]


def test_ctrl_c_leaves_what_was_there_and_nothing_half_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_text("of an earlier run")
    screen, keyboard = open_terminal(100)
    started: Any = subprocess.Popen(
        [sys.executable, "-m", "lbyl", "compress", *DIGITS, *ENDLESS, "--out", str(out)],
        stdin=keyboard, stdout=keyboard, stderr=keyboard, env=os.environ | {"TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in `&`
    )  # fmt: skip
    os.close(keyboard)
    watchdog = threading.Timer(300, started.kill)
    watchdog.start()
    shown = b""
    while b"refining" not in shown:  # the bar of the stage that would take hours
        shown += os.read(screen, 4096)
    started.send_signal(signal.SIGINT)
    told = read_all(screen).decode()
    assert started.wait(timeout=60) == 130
    watchdog.cancel()
    assert "interrupted; nothing was left half written" in told and "Traceback" not in told
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert {p.name: p.read_text() for p in out.iterdir()} == {"plan.json": "of an earlier run"}
