"""Memory that one layer gives back is what the next one gets.

The C library hands blocks of more than 32 MB back to the system when they are freed, and asks for
them again with the next layer; the system fills each page with zeros first. On a processor that is
a fifth of a network's pass. Inside `memory_kept` they stay with the process, as long as what lies
idle is little beside what the machine has free, and are given back at the end.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from lbyl.runtime.contexts import once_for_all
from lbyl.runtime.memory import free_bytes

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # glibc's names for its settings
# Where glibc itself arrives once blocks of 32 MB were freed; once told, it moves no more.
AS_ALWAYS = {MMAP_MAX: 1 << 16, MMAP_THRESHOLD: 1 << 25, TRIM_THRESHOLD: 1 << 26}
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: (1 << 31) - 1}
# Every block of a megabyte goes back when it is freed: smaller ones between them would hold them.
FRUGAL = {MMAP_MAX: 1 << 16, MMAP_THRESHOLD: 1 << 20, TRIM_THRESHOLD: 1 << 20}
PART = 16  # of the memory that is free at the start, so much of it may lie idle

_lock = threading.Lock()
_most = 0  # bytes that may lie idle; 0: none are kept
_told: dict[int, int] | None = None  # what glibc goes by; None where nobody is inside


@once_for_all
@contextmanager
def memory_kept() -> Iterator[None]:
    """Freed memory stays with the process until the last one leaves.

    Without glibc (2.33 or later) nothing happens, nor where another allocator has taken its place.
    """
    global _most, _told
    with _lock:
        _most = 0 if _library() is None else free_bytes(torch.device("cpu")) // PART
        _told = AS_ALWAYS
        if _most:
            _set(KEPT)
            _told = KEPT
    try:
        yield
    finally:
        with _lock:
            _go_by(AS_ALWAYS)
            _told = None


def keep_no_more() -> None:
    """From now on, until all have left, large blocks go back when they are freed."""
    with _lock:
        if _told is KEPT:
            _go_by(AS_ALWAYS)


def spare_memory() -> None:
    """From now on, until all have left, freed blocks go back: there is little memory.

    Those that lie idle already do so whenever this is called.
    """
    with _lock:
        if _told is not None:
            _go_by(FRUGAL)


def _go_by(values: dict[int, int]) -> None:
    """Settings for the rest of the time, and what lies idle given back."""
    global _most, _told
    library = _library()
    if library is not None:
        if _told is not values:
            _set(values)
        library.malloc_trim(0)
    _most, _told = 0, values


def look_at_idle_memory() -> None:
    """Keep no more where too much of it lies idle: blocks of other sizes do not fit into gaps."""
    if _told is FRUGAL:
        spare_memory()
    elif _most and _idle_bytes() > _most:
        keep_no_more()


class _Told(ctypes.Structure):
    """What glibc tells of its memory (`struct mallinfo2`)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _library() -> ctypes.CDLL | None:
    """The C library of this process, None where it is another than glibc."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Told
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, TypeError, AttributeError):  # Windows, macOS, musl
        return None
    return library


def _set(values: dict[int, int]) -> None:
    library = _library()
    if library is not None:
        for name, value in values.items():
            library.mallopt(name, value)


def _idle_bytes() -> int:
    library = _library()
    return 0 if library is None else int(library.mallinfo2().fordblks)
