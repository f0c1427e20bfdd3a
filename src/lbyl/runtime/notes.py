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


class Note(str):
    """A line "layer: what was done instead" that knows its layer, "" where it is of none."""

    layer: str
    text: str

    def __new__(cls, layer: str, text: str) -> Note:
        self = super().__new__(cls, f"{layer}: {text}" if layer else text)
        self.layer, self.text = layer, text
        return self

    @classmethod
    def read(cls, line: str) -> Note:
        """The note that a line stands for: itself, or what was stored as text."""
        if isinstance(line, Note):
            return line
        layer, told, text = line.partition(": ")
        return cls(layer, text) if told else cls("", line)

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.layer, self.text


_notes: ContextVar[list[Note] | None] = ContextVar("notes", default=None)
_layer: ContextVar[str] = ContextVar("layer", default="")


@contextmanager
def noting() -> Iterator[list[Note]]:
    """Collect what is noted inside, in order.

    An outer `noting` does not see it: the inner one decides what becomes of its notes.
    """
    notes: list[Note] = []
    with holding(_notes, notes):
        yield notes


@contextmanager
def at(layer: str) -> Iterator[None]:
    """Notes inside belong to the layer of this name."""
    with holding(_layer, layer):
        yield


def note(what: str) -> None:
    """Tell of a fallback, once for each layer; nothing happens outside of `noting`."""
    repeat([Note(_layer.get(), what)])


def repeat(found: Iterable[Note]) -> None:
    """Tell again what an inner `noting` collected."""
    notes = _notes.get()
    if notes is not None:
        notes += [one for one in found if one not in notes]
