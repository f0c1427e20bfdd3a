"""A line that moves while something takes long: what is done, how far it is, how long it takes."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from lbyl.runtime.run import Progress as Callback

WIDTH = 24  # of the bar, in characters
OFTEN = 0.1  # seconds between two drawings


class Extent(ProgressColumn):
    """How many of how many, once that is known; the time spent, and what is left of it."""

    def render(self, task: Task) -> Text:
        count = "" if task.total is None else f"{task.completed:g}/{task.total:g} "
        spent, left = task.elapsed, task.time_remaining
        told = "" if spent is None else clock(spent)
        if left:
            told += f", about {clock(left)} left"
        return Text(count + told, style="progress.remaining")


def clock(seconds: float) -> str:
    """Seconds as 0:07 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def columns() -> tuple[ProgressColumn, ...]:
    """What a bar shows, in the library and on the command line."""
    return TextColumn("{task.description}"), BarColumn(WIDTH), Extent()


def advance(progress: Progress, task: TaskID, stage: str, completed: int, total: int) -> None:
    """Move a bar; another stage begins it anew, so that its time is told by its own pace."""
    if progress.tasks[progress.task_ids.index(task)].description != stage:
        progress.reset(task, description=stage, total=total)
    progress.update(task, completed=completed, total=total)


class Bar:
    """Draws one line on stderr and wipes it when a stage is finished.

    It is drawn when work is reported and by no thread, so that an error leaves nothing running.
    """

    def __init__(self) -> None:
        # In a notebook, too, a line of text that is written over is all that is needed.
        self._console = Console(file=sys.stderr, force_jupyter=False)
        self._progress = Progress(*columns(), console=self._console, auto_refresh=False)
        self._task = self._progress.add_task("", total=None)
        self._length, self._drawn = 0, 0.0

    def __call__(self, stage: str, completed: int, total: int) -> None:
        advance(self._progress, self._task, stage, completed, total)
        if completed >= total:
            self._write("", 0)
        elif time.monotonic() - self._drawn > OFTEN:
            self._drawn = time.monotonic()
            with self._console.capture() as captured:
                self._console.print(self._progress.get_renderable(), end="")
            line = captured.get().split("\n")[0]
            self._write(line, len(Text.from_ansi(line)))

    def _write(self, line: str, length: int) -> None:
        blank = " " * max(0, self._length - length)
        sys.stderr.write(f"\r{line}{blank}" + ("" if line else "\r"))
        sys.stderr.flush()
        self._length = length


def shown(progress: Callback | bool | None) -> Callback | None:
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
