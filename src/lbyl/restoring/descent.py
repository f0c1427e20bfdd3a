"""Gradient steps: the gradients of a loss, and Adam with a rate for every tensor.

A step of refinement is thousands of small kernels, and starting them from Python takes longer than
running them. On a GPU they are recorded once, as a CUDA graph, and replayed for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.torchkit.run import Inputs

BETAS = (0.9, 0.99)  # of Adam, whose usual long average of squares is no use in tens of steps
WARM_UP = 2  # runs before recording, in which libraries choose their algorithms

Loss = Callable[[Inputs], Tensor]
Gradients = Sequence[Tensor | None]


@dataclass
class Differentiated:
    """The gradients of a loss of inputs, in the order of the parameters."""

    loss: Loss
    parameters: Sequence[nn.Parameter]
    _recording: Recording | None = field(default=None, init=False)
    _tried: bool = field(default=False, init=False)

    def __call__(self, inputs: Inputs) -> Gradients:
        if not self._tried:
            self._tried = True
            self._recording = record(self._eager, inputs)
        if self._recording is not None and self._recording.fits(inputs):
            return self._recording(inputs)
        return self._eager(inputs)

    def _eager(self, inputs: Inputs) -> Gradients:
        return torch.autograd.grad(self.loss(inputs), self.parameters, allow_unused=True)


@dataclass
class Recording:
    """A recorded run: its input is overwritten, its kernels run again, its results handed out."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Gradients

    def fits(self, inputs: Inputs) -> bool:
        given = _tensors(inputs)
        return given is not None and [_kind(x) for x in given] == [_kind(x) for x in self.inputs]

    def __call__(self, inputs: Inputs) -> Gradients:
        for own, given in zip(self.inputs, _tensors(inputs) or ()):
            own.copy_(given)
        self.graph.replay()
        return self.results


def record(run: Callable[[Inputs], Gradients], inputs: Inputs) -> Recording | None:
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


def _record(run: Callable[[Inputs], Gradients], inputs: Inputs) -> Recording:
    side = torch.cuda.Stream()
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


class Adam:
    """Adam with a rate for every tensor, all tensors at once: a group each would take longer."""

    def __init__(self, parameters: Sequence[nn.Parameter], rates: Sequence[float]) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.rates = list(rates)
        self.means = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        self.squares = [torch.zeros_like(m) for m in self.means]
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Gradients, factor: float) -> None:
        """Move against the gradients, at `factor` times the rates."""
        self.steps += 1
        given = [
            torch.zeros_like(m) if g is None else g.to(m) for g, m in zip(gradients, self.means)
        ]
        slow, slower = BETAS
        torch._foreach_lerp_(self.means, given, 1 - slow)
        torch._foreach_mul_(self.squares, slower)
        torch._foreach_addcmul_(self.squares, given, given, 1 - slower)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, (1 - slower**self.steps) ** 0.5)
        torch._foreach_add_(roots, 1e-12)
        moves = torch._foreach_div(self.means, roots)
        scale = factor / (1 - slow**self.steps)
        torch._foreach_mul_(moves, [-rate * scale for rate in self.rates])
        torch._foreach_add_(self.parameters, tuple(m.to(p) for m, p in zip(moves, self.parameters)))


@contextmanager
def requiring_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients for these inside, every parameter as it was afterwards."""
    flags = [p.requires_grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in zip(parameters, flags):
            parameter.requires_grad_(flag)
