"""Shell-style patterns of layer names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def listed(patterns: str | Sequence[str]) -> Sequence[str]:
    """One pattern or several, as a list; what is neither is refused by whoever reads it."""
    several = isinstance(patterns, (list, tuple, set, frozenset))
    return list(patterns) if several else [patterns]  # type: ignore[list-item]


def matches(name: str, patterns: str | Sequence[str]) -> bool:
    """Whether a layer's name fits one of the patterns (`layer4.*`, `features.3`)."""
    return any(fnmatchcase(name, pattern) for pattern in listed(patterns))


def names_attention(pattern: object) -> bool:
    """Whether a pattern asks for units of attention: `*:heads`, `layers.3.*:qk`."""
    return isinstance(pattern, str) and ":" in pattern
