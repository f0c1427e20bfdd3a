"""Numbers as people read them; what is not a finite number becomes a dash."""

from __future__ import annotations

import math
from typing import Any

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


def count(value: float) -> str:
    """Thousands, millions and thousand millions by their letters."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {letter}"
    return f"{value:.0f}"


def size(value: float) -> str:
    """Bytes, in units of 1,000."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def change(before: float, after: float) -> str:
    """By how much of what was there it changed."""
    if not before:
        return ""
    share = 100 * (after / before - 1)
    return f"{share:+.1f} %".replace("-", "−")


def points(before: float, after: float) -> str:
    """The same for percentages, which change by points."""
    return f"{after - before:+.2f} points".replace("-", "−")
