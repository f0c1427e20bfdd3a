"""Plots, where matplotlib is installed."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """matplotlib's pyplot for files alone; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
