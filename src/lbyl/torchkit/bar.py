"""A line that moves while something takes long, for those who call the library themselves."""

from __future__ import annotations

import sys

from lbyl.torchkit.run import Progress

WIDTH = 24  # of the bar, in characters


class Bar:
    """Draws one line on stderr and wipes it when a stage is finished."""

    def __init__(self) -> None:
        self._length = 0

    def __call__(self, stage: str, completed: int, total: int) -> None:
        filled = WIDTH * completed // max(total, 1)
        line = f"{stage} {'━' * filled}{'╌' * (WIDTH - filled)} {completed}/{total}"
        self._write("" if completed >= total else line)

    def _write(self, line: str) -> None:
        blank = " " * max(0, self._length - len(line))
        sys.stderr.write(f"\r{line}{blank}" + ("" if line else "\r"))
        sys.stderr.flush()
        self._length = len(line)


def shown(progress: Progress | bool | None) -> Progress | None:
    """What to call as work goes on: a bar for True, nothing for False.

    Where nothing is said there is a bar if somebody looks: in a terminal and in a notebook.
    """
    if progress is None:
        progress = sys.stderr.isatty() or _in_notebook()
    if isinstance(progress, bool):
        return Bar() if progress else None
    return progress


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
