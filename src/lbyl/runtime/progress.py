"""Telling how far work is."""

from __future__ import annotations

import importlib.util
from typing import Any

from lbyl.runtime.run import Progress


class Bar:
    """A bar of tqdm for each stage of the work."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, completed: int, total: int) -> None:
        if stage != self._stage or self._bar is None:
            self._close()
            self._stage, self._bar = stage, _drawn(stage, total)
        self._bar.total = total
        self._bar.update(completed - self._bar.n)
        if completed >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._stage, self._bar = "", None


def _drawn(stage: str, total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=stage, leave=False)


def callback(progress: Progress | bool | None) -> Progress | None:
    """What to call as work goes on: for True a bar, where tqdm is installed; else what is given."""
    if isinstance(progress, bool) or progress is None:
        return Bar() if progress and importlib.util.find_spec("tqdm") else None
    return progress
