"""Conditions that nearly always hold, looked at together instead of one by one.

To look at a number that a device computes is to wait until it has computed everything before it,
and it then waits for whoever looked. So whoever has many such conditions takes them for granted
inside `assuming`, looks at all of them once, and does again, outside, what rested on one that did
not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from lbyl.runtime.contexts import holding

_assumed: ContextVar[list[Tensor] | None] = ContextVar("assumed", default=None)


@contextmanager
def assuming() -> Iterator[list[Tensor]]:
    """Take conditions inside for granted, and collect them."""
    conditions: list[Tensor] = []
    with holding(_assumed, conditions):
        yield conditions


def holds(condition: Tensor) -> bool:
    """Whether a condition, a tensor of one flag, holds; inside `assuming` it is taken to."""
    assumed = _assumed.get()
    if assumed is None:
        return bool(condition)
    assumed.append(condition.reshape(()))
    return True


def are_assumed() -> bool:
    """Whether conditions are taken for granted here."""
    return _assumed.get() is not None
