"""Recorded runs: the kernels of a computation as a CUDA graph, replayed on other inputs like them.

A gradient step is thousands of small kernels, and starting them from Python takes longer than
running them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.runtime.run import Inputs

WARM_UP = 2  # runs before recording, in which libraries choose their algorithms

Results = Sequence[Tensor | None]
Run = Callable[[Inputs], Results]


@dataclass
class Recorded:
    """`run`, recorded when it is first called and replayed wherever the recording fits.

    What it gives holds until the next call.
    """

    run: Run
    _recording: Recording | None = field(default=None, init=False)
    _tried: bool = field(default=False, init=False)

    def __call__(self, inputs: Inputs) -> Results:
        if not self._tried:
            self._tried = True
            self._recording = record(self.run, inputs)
        if self._recording is not None and self._recording.fits(inputs):
            return self._recording(inputs)
        return self.run(inputs)


@dataclass
class Recording:
    """A recorded run: its input is overwritten, its kernels run again, its results handed out."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Results

    def fits(self, inputs: Inputs) -> bool:
        given = _tensors(inputs)
        return given is not None and [_kind(x) for x in given] == [_kind(x) for x in self.inputs]

    def __call__(self, inputs: Inputs) -> Results:
        for own, given in zip(self.inputs, _tensors(inputs) or ()):
            own.copy_(given)
        self.graph.replay()
        return self.results


def record(run: Run, inputs: Inputs) -> Recording | None:
    """`run` on such inputs as a recording; None where it cannot be recorded.

    It cannot on a CPU, and where values decide what runs, as in detectors. Images lie channel by
    channel in the innermost dimension, which convolutions are fastest with, where `run` can take
    them so.
    """
    given = _tensors(inputs)
    if not given or not all(x.is_cuda for x in given):
        return None
    for layout in (torch.channels_last, torch.contiguous_format):
        own = tree_map_only(Tensor, partial(_laid_out, layout=layout), inputs)
        try:
            return _record(run, own)
        except RuntimeError:  # what is recorded may not wait for a value, views need an order
            torch.cuda.synchronize()
    return None


FEW = 3  # repetitions that do not pay for a recording


def repeated(step: Callable[[], None], times: int, device: torch.device) -> Iterator[None]:
    """Take a step so many times, which changes tensors in place; yields after each.

    On a CUDA device the first is taken as it is, the second recorded, and that replayed.
    """
    graph: torch.cuda.CUDAGraph | None = None
    for i in range(times):
        if device.type == "cuda" and i == 1 and times > FEW:
            graph = _captured(step, device)
        step() if graph is None else graph.replay()
        yield


def _captured(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph | None:
    """A step's kernels, which do not run meanwhile; None where they cannot be recorded."""
    graph, side = torch.cuda.CUDAGraph(), _side_stream(device, threading.get_ident())
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        try:
            graph.capture_begin()
            try:
                step()
            finally:
                graph.capture_end()
        except RuntimeError:
            torch.cuda.synchronize(device)
            return None
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


@cache
def _side_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """The stream that a thread records on: for every new one cuBLAS keeps 32 MB for good."""
    return torch.cuda.Stream(device)


def _record(run: Run, inputs: Inputs) -> Recording:
    side = _side_stream(torch.device("cuda"), threading.get_ident())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(inputs)
    return Recording(graph, _tensors(inputs) or [], results)


def _tensors(inputs: Inputs) -> list[Tensor] | None:
    """All the leaves of inputs, None where some are no tensors."""
    leaves = [x for x in tree_flatten(inputs)[0] if x is not None]
    return leaves if all(isinstance(x, Tensor) for x in leaves) else None


def _kind(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def _laid_out(x: Tensor, layout: torch.memory_format) -> Tensor:
    """A copy of a tensor, images in this layout."""
    return x.clone(memory_format=layout if x.dim() == 4 else torch.contiguous_format)
