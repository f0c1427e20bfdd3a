"""What a network's `forward` does besides computing from its inputs and weights.

A run of the network as it was given shows it (`guest.py`), and holds for every run that follows,
of smaller copies too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from lbyl.runtime.contexts import holding
from lbyl.runtime.session import own_randomness


@dataclass(frozen=True)
class Habits:
    """What must be looked after while a network runs."""

    draws: frozenset[str] = frozenset()  # global generators that it draws from, by name
    writes: frozenset[str] = frozenset()  # parameters that it changes, by name
    differentiates: bool = False  # whether it needs gradients, as forces do


NONE = Habits()
_habits: ContextVar[Habits] = ContextVar("habits", default=NONE)


def current() -> Habits:
    """The habits of the network that is being worked on."""
    return _habits.get()


@contextmanager
def minding(habits: Habits) -> Iterator[None]:
    """Networks that run inside have these habits; generators they draw from are put back."""
    with holding(_habits, habits), own_randomness(habits.draws):
        yield
