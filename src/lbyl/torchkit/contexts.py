"""A context variable that holds a value inside a `with`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Held = TypeVar("Held")


@contextmanager
def holding(variable: ContextVar[T | Held], value: Held) -> Iterator[Held]:
    """`variable` holds `value` inside, and afterwards what it held before, also after an error."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
