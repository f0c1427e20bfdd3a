"""Independent pieces of linear algebra side by side.

A factorisation of a few hundred rows fills neither several cores nor a device: several at once do.
On a processor each piece has one core; on a CUDA device each worker has a stream of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lbyl.torchkit.surroundings import one_thread

STREAMS = 4  # more wait for each other in Python

_here = threading.local()

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def each(
    work: Callable[[Item], Answer],
    items: Sequence[Item],
    device: torch.device,
    told: Callable[[Answer], object] = lambda answer: answer,
) -> list[Answer]:
    """What `work` makes of every item, in order; several at a time.

    `told` gives what holds the tensors of an answer, where that is no list, tuple or dict.
    """
    on_device = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    workers = STREAMS if on_device else torch.get_num_threads() if device.type == "cpu" else 1
    if min(workers, len(items)) < 2 or getattr(_here, "inside", False):
        return [work(item) for item in items]
    if on_device:
        return _on_streams(work, items, device, workers, told)
    with one_thread():
        return _threaded(work, items, workers)


def _threaded(work: Callable[[Item], Answer], items: Sequence[Item], workers: int) -> list[Answer]:
    with ThreadPoolExecutor(workers) as pool:
        # Each in the caller's context: notes of fallbacks go where they would.
        waiting = [pool.submit(copy_context().run, work, item) for item in items]
        return [one.result() for one in waiting]


def _on_streams(
    work: Callable[[Item], Answer],
    items: Sequence[Item],
    device: torch.device,
    workers: int,
    told: Callable[[Answer], object],
) -> list[Answer]:
    main = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(workers)]
    for stream in streams:
        stream.wait_stream(main)

    def some(number: int) -> list[Answer]:
        _here.inside = True  # the thread ends with this
        with torch.cuda.device(device), torch.cuda.stream(streams[number]):
            return [work(item) for item in items[number::workers]]

    parts = _threaded(some, range(workers), workers)
    for stream in streams:
        main.wait_stream(stream)
    answers = [parts[i % workers][i // workers] for i in range(len(items))]
    for answer in answers:
        for x in tree_flatten(told(answer))[0]:
            if isinstance(x, Tensor) and x.is_cuda:
                x.record_stream(main)  # its memory must not be given away while it is read there
    return answers
