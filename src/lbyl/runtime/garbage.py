"""Python's search for cycles, kept to what is new.

It looks at every object there is once in a while, by how many were made. With torch loaded such a
look takes a fifth of a second, which is as long as a network's whole trace.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from lbyl.runtime.contexts import once_for_all

NEVER = 1 << 30  # searches among young objects after which all are looked at


@once_for_all
@contextmanager
def young_objects_only() -> Iterator[None]:
    """Cycles are looked for among young objects only, which most are."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
