"""What the terminal shows: stages with progress, tables, and JSON where that is asked for.

Results go to stdout and everything else to stderr, so that a pipe receives results only.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape, render
from rich.progress import Progress, SpinnerColumn, TaskID
from rich.table import Table
from rich.text import Text

from lbyl.app.cli.bar import advance, columns

PIPE_WIDTH = 120  # of what is not written to a window


class Tick:
    """Moves a bar; without one it does nothing."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress, self._task = progress, task

    def __call__(self, completed: int, total: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=completed, total=total)

    def named(self, stage: str, completed: int, total: int) -> None:
        """As the library reports: the stage's own name comes along."""
        if self._progress is not None and self._task is not None:
            advance(self._progress, self._task, stage, completed, total)


@dataclass
class Screen:
    """Where a command writes; `json` and `quiet` hold back what is meant for people."""

    json: bool = False
    quiet: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    _tick: Tick = field(default_factory=Tick)

    def __post_init__(self) -> None:
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        self.out: Console = Console(width=width, highlight=False)
        self.log: Console = Console(stderr=True, highlight=False)

    @property
    def talks(self) -> bool:
        return not (self.json or self.quiet)

    def say(self, *lines: RenderableType) -> None:
        """Results for people."""
        if self.talks:
            for line in lines:
                # A window breaks sentences between words; programs, which are indented, and what
                # goes into a pipe stay as they are, to be copied.
                sentence = isinstance(line, str) and not line.startswith("    ")
                wrapped = sentence and self.out.is_terminal
                self.out.print(line, soft_wrap=isinstance(line, str) and not wrapped)

    def note(self, line: str) -> None:
        """A remark beside the results."""
        if self.talks:
            self.log.print(line)

    def warn(self, line: str) -> None:
        """Something the user should know; commands in it are lines of their own, to be copied."""
        if self.talks:
            first, *rest = line.splitlines() or [""]
            self.log.print(f"[yellow]note:[/] {plain(first)}")
            for command in rest:
                self.log.print(f"[cyan]{plain(command)}[/]", soft_wrap=True)

    def data(self, value: Any) -> None:
        """Results for programs."""
        if self.json:
            print(json.dumps(value, indent=1), flush=True)

    def progress(self, stage: str, completed: int, total: int) -> None:
        """What the library reports, shown by the bar of the stage that is running."""
        self._tick.named(stage, completed, total)

    @contextmanager
    def stage(self, name: str) -> Iterator[Tick]:
        """A step that takes time: a bar while it runs, a line with its seconds afterwards."""
        started, before = time.perf_counter(), self._tick
        try:
            if not (self.talks and self.log.is_terminal):
                # What others print meanwhile is no result of ours; a bar keeps it off stdout too.
                with redirect_stdout(sys.stderr if self.talks else io.StringIO()):
                    yield Tick()
            else:
                with _bar(self.log) as progress:
                    self._tick = Tick(progress, progress.add_task(name, total=None))
                    yield self._tick
        finally:
            self._tick = before
        spent = time.perf_counter() - started
        self.seconds[name] = round(spent, 3)
        self.note(f"[green]✓[/] {name} [dim]{spent:.1f} s[/]")


def _bar(console: Console) -> Progress:
    return Progress(SpinnerColumn(), *columns(), console=console, transient=True)


@dataclass(frozen=True)
class FittedTable:
    """A table whose first column, the names, is the last thing that a narrow window takes.

    Columns of `lists` are folded first; then columns are left out from the right, and named.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    highlight: int | None = None
    lists: Collection[str] = ()

    LIST_WIDTH = 16  # to which a list may be folded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room, shown = options.max_width, len(self.columns)
        while shown > 2 and self._edges(shown) + sum(self._least(shown)) > room:
            shown -= 1
        yield self._table(self._widths(shown, room))
        if shown < len(self.columns):
            left_out = ", ".join(self.columns[shown:])
            yield Text(f"  not shown in a window this narrow: {left_out}", style="dim")

    def _edges(self, shown: int) -> int:
        """The space around so many columns: two to the left of each and one to the right."""
        return 3 * shown + 1

    def _natural(self, index: int) -> int:
        texts = [self.columns[index], *(render(row[index]).plain for row in self.rows)]
        return max(cell_len(text) for text in texts)

    def _least(self, shown: int) -> list[int]:
        return [
            min(self._natural(i), self.LIST_WIDTH) if name in self.lists else self._natural(i)
            for i, name in enumerate(self.columns[:shown])
        ]

    def _widths(self, shown: int, room: int) -> list[int]:
        """The width of every column; lists share what the others leave, names fold at the last."""
        widths = self._least(shown)
        room -= self._edges(shown)
        for index in (i for i, name in enumerate(self.columns[:shown]) if name in self.lists):
            spare = max(0, room - sum(widths))
            widths[index] = min(self._natural(index), widths[index] + spare)
        widths[0] = max(8, min(widths[0], room - sum(widths[1:])))
        return widths

    def _table(self, widths: Sequence[int]) -> Table:
        made = Table(box=box.SIMPLE_HEAD)
        for index, (column, width) in enumerate(zip(self.columns, widths)):
            right = index > 0 and column not in self.lists
            made.add_column(
                column, justify="right" if right else "left", width=width, overflow="fold"
            )
        for index, row in enumerate(self.rows):
            style = "bold green" if index == self.highlight else None
            made.add_row(*row[: len(widths)], style=style)
        return made


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    highlight: int | None = None,
    lists: Collection[str] = (),
) -> RenderableType:
    """A plain table: names to the left, numbers to the right, one row in bold."""
    return FittedTable(columns, [[cell(value) for value in row] for row in rows], highlight, lists)


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else plain(str(value))


def plain(text: str) -> str:
    """Text that is not ours: brackets in it are brackets, not colours."""
    return escape(text)


def bold(text: object) -> str:
    """A name in bold, whatever it is made of."""
    return f"[bold]{plain(str(text))}[/]"
