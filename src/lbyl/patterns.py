"""Shell-style patterns of layer names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(name: str, patterns: str | Sequence[str]) -> bool:
    """Whether a layer's name fits one of the patterns (`layer4.*`, `features.3`)."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in listed)
