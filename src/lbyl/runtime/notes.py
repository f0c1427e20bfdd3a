"""What could not be computed as meant, and what was done instead.

A network may hold dead filters, constant channels, or numbers at the end of their range. What
cannot be computed there is left out for that layer alone and noted, so that a result can tell:
`with noting() as notes:` around a call, `note(...)` wherever a fallback is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lbyl.runtime.contexts import holding

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_layer: ContextVar[str] = ContextVar("layer", default="")


@contextmanager
def noting() -> Iterator[list[str]]:
    """Collect what is noted inside, in order: "layer: what was done instead".

    An outer `noting` does not see it: the inner one decides what becomes of its notes.
    """
    notes: list[str] = []
    with holding(_notes, notes):
        yield notes


@contextmanager
def at(layer: str) -> Iterator[None]:
    """Notes inside belong to the layer of this name."""
    with holding(_layer, layer):
        yield


def note(what: str) -> None:
    """Tell of a fallback, once for each layer; nothing happens outside of `noting`."""
    notes, layer = _notes.get(), _layer.get()
    line = f"{layer}: {what}" if layer else what
    if notes is not None and line not in notes:
        notes.append(line)


def repeat(lines: Iterable[str]) -> None:
    """Tell again what an inner `noting` collected."""
    notes = _notes.get()
    if notes is not None:
        notes += [line for line in lines if line not in notes]
