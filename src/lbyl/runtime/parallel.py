"""Independent pieces of linear algebra side by side, a core for each.

A factorisation of a few hundred rows does not fill several cores: several at once do. On a device
they run one after the other: streams of their own made it slower (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

from lbyl.runtime.session import one_thread

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def each(
    work: Callable[[Item], Answer], items: Sequence[Item], device: torch.device
) -> list[Answer]:
    """What `work` makes of every item, in order; on a processor several at a time."""
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    if min(workers, len(items)) < 2:
        return [work(item) for item in items]
    with one_thread(), ThreadPoolExecutor(workers) as pool:
        # Each in the caller's context: notes of fallbacks go where they would.
        waiting = [pool.submit(copy_context().run, work, item) for item in items]
        return [one.result() for one in waiting]
