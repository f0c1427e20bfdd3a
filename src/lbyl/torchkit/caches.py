"""Functions that remember what they have computed (`functools.lru_cache`), in a network's code.

What they remember outlives a run and serves every network of a class. A run on tensors without data
must leave nothing of the kind behind: the next real run would compute with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forgetful(model: nn.Module) -> Iterator[None]:
    """Whatever functions of a network's code come to remember inside is forgotten afterwards."""
    known = {id(c): c for kind in {type(m) for m in model.modules()} for c in _remembering(kind)}
    before = {key: one.cache_info().misses for key, one in known.items()}
    try:
        yield
    finally:
        for key, one in known.items():
            if one.cache_info().misses != before[key]:
                one.cache_clear()


_found: dict[type[nn.Module], list[Any]] = {}


def _remembering(kind: type[nn.Module]) -> list[Any]:
    """Functions with a memory among the methods of a class and in the file that it stands in."""
    if kind in _found:
        return _found[kind]
    found: list[Any] = []
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            continue
        file = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for value in [*vars(base).values(), *file.values()]:
            found += _of(value)
    _found[kind] = found
    return found


def _of(value: Any) -> Iterator[Any]:
    """The function with a memory that something is, or that it calls."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    cells = getattr(function, "__closure__", None)
    inner = [c.cell_contents for c in cells if _filled(c)] if isinstance(cells, tuple) else []
    for one in (function, *inner):
        if type(one).__name__ == "_lru_cache_wrapper":
            yield one


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # nothing is in it yet
        return False
