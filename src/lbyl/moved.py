"""Modules that have moved: their old names work for one more version, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings


def moved(old: str, new: str, **parts: str) -> None:
    """Put a module in the place of its old name, and others in that of parts of it."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with version 0.5", FutureWarning, stacklevel=3
    )
    for part, home in parts.items():
        sys.modules[f"{old}.{part}"] = importlib.import_module(home)
    sys.modules[old] = importlib.import_module(new)
