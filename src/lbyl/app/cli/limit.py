"""Work that ends when its time is up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")
AGAIN = 2.0  # seconds after which it is said again, where something took no notice


class TimeUp(BaseException):
    """The time is up. No `Exception`, so that nothing takes it for a failure of its own."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` inside after so many seconds.

    Only the main thread of a process that knows timers is interrupted; elsewhere work runs on.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return
    before, start = signal.signal(signal.SIGALRM, _up), time.monotonic()
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # somebody else's timer was running
            left = max(left - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, again)


def _up(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeUp


def in_time(work: Mapping[str, Callable[[], T]], seconds: float) -> tuple[list[T], list[str]]:
    """What the work gives, one after the other, and the names of what was left out for time."""
    end = time.monotonic() + seconds
    found, left_out = [], []
    for name, run in work.items():
        left = end - time.monotonic()
        try:
            if left <= 0:
                raise TimeUp
            with at_most(left):
                found.append(run())
        except TimeUp:
            left_out.append(name)
    return found, left_out
