"""What the terminal shows: stages with progress, tables, and JSON where that is asked for.

Results go to stdout and everything else to stderr, so that a pipe receives results only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID


class Tick:
    """Moves a bar; without one it does nothing."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: int, total: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def named(self, stage: str, done: int, total: int) -> None:
        """As the library reports: the stage's own name comes along."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=stage)
        self(done, total)


@dataclass
class Screen:
    """Where a command writes; `json` and `quiet` hold back what is meant for people."""

    json: bool = False
    quiet: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from rich.console import Console

        # Piped into a file there is no window to fit: tables must not be folded there.
        wide = None if sys.stdout.isatty() else 120
        self.out: Console = Console(width=wide, highlight=False)
        self.log: Console = Console(stderr=True, highlight=False)

    @property
    def talks(self) -> bool:
        return not (self.json or self.quiet)

    def say(self, *lines: RenderableType) -> None:
        """Results for people."""
        if self.talks:
            for line in lines:
                self.out.print(line)

    def note(self, line: str) -> None:
        """A remark beside the results."""
        if self.talks:
            self.log.print(line)

    def warn(self, line: str) -> None:
        """Something the user should know."""
        if self.talks:
            self.log.print(f"[yellow]note:[/] {plain(line)}")

    def data(self, value: Any) -> None:
        """Results for programs."""
        if self.json:
            print(json.dumps(value, indent=1), flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[Tick]:
        """A step that takes time: a bar while it runs, a line with its seconds afterwards."""
        started = time.perf_counter()
        if not (self.talks and self.log.is_terminal):
            yield Tick()
        else:
            with _bar(self.log) as progress:
                task = progress.add_task(name, total=None)
                yield Tick(progress, task)
        spent = time.perf_counter() - started
        self.seconds[name] = round(spent, 3)
        self.note(f"[green]✓[/] {name} [dim]{spent:.1f} s[/]")


def _bar(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Count(MofNCompleteColumn):
        """How many of how many, once that is known."""

        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(24), Count(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    highlight: int | None = None,
) -> RenderableType:
    """A plain table: first column to the left, numbers to the right, one row in bold."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD)
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left", no_wrap=place > 0)
    for place, row in enumerate(rows):
        made.add_row(*map(cell, row), style="bold green" if place == highlight else None)
    return made


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else plain(str(value))


def plain(text: str) -> str:
    """Text that is not ours: brackets in it are brackets, not colours."""
    from rich.markup import escape

    return escape(text)


def bold(text: object) -> str:
    """A name in bold, whatever it is made of."""
    return f"[bold]{plain(str(text))}[/]"


def human(count: float) -> str:
    """A large number in three figures."""
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= limit:
            return f"{count / limit:.2f}{suffix}"
    return f"{count:.0f}"


def some(count: int, noun: str) -> str:
    """So many of something."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def change(before: float, after: float) -> str:
    """By how many per cent something changed."""
    return f"{100 * (after / before - 1):+.1f} %" if before else "–"
