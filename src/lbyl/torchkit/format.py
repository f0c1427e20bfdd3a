"""Numbers and counts as people read them."""

from __future__ import annotations


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
