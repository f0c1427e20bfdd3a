"""A line that moves while something takes long: what is done, how far it is, how long it takes."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

WIDTH = 24  # of the bar, in characters


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
    """What a bar on the command line shows."""
    return TextColumn("{task.description}"), BarColumn(WIDTH), Extent()


def advance(progress: Progress, task: TaskID, stage: str, completed: int, total: int) -> None:
    """Move a bar; another stage begins it anew, so that its time is told by its own pace."""
    if progress.tasks[progress.task_ids.index(task)].description != stage:
        progress.reset(task, description=stage, total=total)
    progress.update(task, completed=completed, total=total)
