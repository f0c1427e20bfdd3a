"""Shell-style patterns of layer names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def listed(patterns: str | Sequence[str]) -> Sequence[str]:
    """One pattern or several, as a list."""
    return [patterns] if isinstance(patterns, str) else patterns


def matches(name: str, patterns: str | Sequence[str]) -> bool:
    """Whether a layer's name fits one of the patterns (`layer4.*`, `features.3`)."""
    return any(fnmatchcase(name, pattern) for pattern in listed(patterns))
