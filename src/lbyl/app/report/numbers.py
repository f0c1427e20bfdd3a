"""Numbers on the page: what is not a finite number becomes a dash, a minus is a minus."""

from __future__ import annotations

import math
from typing import Any

from lbyl.runtime.format import human, percent_change

DASH = "–"


def finite(value: Any) -> float | None:
    """A number that can be drawn, or None."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def short(value: Any) -> str:
    """Three significant digits, without an exponent where none is needed."""
    number = finite(value)
    if number is None:
        return DASH
    if number == 0:
        return "0"
    if 1e-3 <= abs(number) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(number))))
        text = f"{number:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{number:.1e}"


def steady(value: Any) -> str:
    """Always as many decimals, for columns of numbers."""
    number = finite(value)
    if number is None:
        return DASH
    return f"{number:.3f}" if abs(number) < 1e5 else f"{number:.2e}"


def size(value: float) -> str:
    """Bytes, in units of 1,000."""
    return f"{human(value)}B" if abs(value) >= 1e3 else f"{value:.0f} B"


def change(before: float, after: float) -> str:
    """By how many per cent something changed."""
    return _with_minus(percent_change(before, after))


def points(before: float, after: float) -> str:
    """The same for percentages, which change by points."""
    return _with_minus(f"{after - before:+.2f} points")


def _with_minus(text: str) -> str:
    return text.replace("-", "−")
