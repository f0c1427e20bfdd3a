"""Contexts: a variable that holds a value inside, and one that all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

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


def once_for_all(
    context: Callable[[], AbstractContextManager[None]],
) -> Callable[[], _GeneratorContextManager[None]]:
    """A context of the whole process: the first who comes enters it, the last who goes leaves it.

    Several threads may be inside, and one several times. It also decorates, as what it is made of.
    """
    lock, entered, inside = threading.Lock(), ExitStack(), 0

    @contextmanager
    @wraps(context)
    def shared() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                entered.enter_context(context())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    entered.close()

    return shared
