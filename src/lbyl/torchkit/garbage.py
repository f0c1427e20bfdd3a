"""Python's search for cycles, kept to what is new.

It looks at every object there is once in a while, by how many were made. With torch loaded such a
look takes a fifth of a second, which is as long as a network's whole trace.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30  # searches among young objects after which all are looked at

_lock = threading.Lock()
_inside = 0
_before = gc.get_threshold()


@contextmanager
def young_objects_only() -> Iterator[None]:
    """Cycles are looked for among young objects only, which most are; several threads may be in."""
    global _inside, _before
    with _lock:
        if not _inside:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], NEVER)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                gc.set_threshold(*_before)
