"""Memory that one layer gives back is what the next one gets.

The C library hands blocks of more than 32 MB back to the system when they are freed, and asks for
them again with the next layer; the system fills each page with zeros first. On a processor that is
a fifth of a network's pass. Inside `memory_kept` they stay with the process, which gives them back
at the end.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # glibc's names for its settings
# Where glibc itself arrives once blocks of 32 MB were freed; once told, it moves no more.
AS_ALWAYS = {MMAP_MAX: 1 << 16, MMAP_THRESHOLD: 1 << 25, TRIM_THRESHOLD: 1 << 26}
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: (1 << 31) - 1}

_lock = threading.Lock()
_inside = 0


@contextmanager
def memory_kept() -> Iterator[None]:
    """Freed memory stays with the process until the last one leaves; several threads may be in.

    Without glibc nothing happens, nor where another allocator has taken its place.
    """
    global _inside
    with _lock:
        if not _inside:
            _set(KEPT)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _set(AS_ALWAYS)
                _give_back()


def keep_no_more() -> None:
    """From now on, until all have left, memory goes back at once: there is little of it."""
    with _lock:
        if _inside:
            _set(AS_ALWAYS)
            _give_back()


@cache
def _library() -> ctypes.CDLL | None:
    """The C library of this process, None where it is another than glibc."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version, library.mallopt, library.malloc_trim  # noqa: B018
    except (OSError, TypeError, AttributeError):  # Windows, macOS, musl
        return None
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def _set(values: dict[int, int]) -> None:
    library = _library()
    if library is not None:
        for name, value in values.items():
            library.mallopt(name, value)


def _give_back() -> None:
    library = _library()
    if library is not None:
        library.malloc_trim(0)
