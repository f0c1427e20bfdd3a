"""Numbers and counts as people read them."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]


def human(count: float) -> str:
    """A large number in three figures: 25.56 M."""
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= limit:
            return f"{count / limit:.2f}{suffix}"
    return f"{count:.0f}"


def percent_change(before: float, after: float) -> str:
    """By how many per cent something changed: -31.2 %."""
    return f"{100 * (after / before - 1):+.1f} %" if before else "–"


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 layer, 2 layers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def place_of(error: BaseException) -> str:
    """Where a user's own code raised an error, with the line; nothing where libraries did."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folders = Path(frame.filename).parents
        if HOME in folders or "site-packages" in {folder.name for folder in folders}:
            continue
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        return f" at {Path(frame.filename).name}:{frame.lineno}" + (f" (`{line}`)" if line else "")
    return ""


def percent(fraction: float | None) -> str:
    """A fraction in per cent, with a decimal only where it tells something: 99.4 %, 87 %."""
    if fraction is None:
        return "–"
    shown = 100 * fraction
    return f"{shown:.1f} %" if 99 <= shown < 99.95 or 0 < shown < 1 else f"{shown:.0f} %"


def bounded(fraction: float | None, low: float | None, high: float | None) -> str:
    """The same with its bounds, for a table: 94 % (83–98)."""
    if fraction is None:
        return "–"
    ends = [percent(end).removesuffix(" %") for end in (low, high)]
    return f"{percent(fraction)} ({'–'.join(ends)})"
