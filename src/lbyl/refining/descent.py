"""Gradient steps: the gradients of a loss, and Adam with a rate for every tensor.

On a GPU a step is recorded once and replayed for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lbyl.runtime.recording import Recorded, Results
from lbyl.runtime.run import Inputs

BETAS = (0.9, 0.99)  # of Adam, whose usual long average of squares is no use in tens of steps

Loss = Callable[[Inputs], Tensor]


def differentiated(loss: Loss, parameters: Sequence[nn.Parameter]) -> Recorded:
    """The gradients of a loss of inputs, in the order of the parameters."""
    return Recorded(lambda inputs: torch.autograd.grad(loss(inputs), parameters, allow_unused=True))


class Adam:
    """Adam with a rate for every tensor, all tensors at once: a group each would take longer."""

    def __init__(self, parameters: Sequence[nn.Parameter], rates: Sequence[float]) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.rates = list(rates)
        self.means = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        self.squares = [torch.zeros_like(m) for m in self.means]
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Results, factor: float) -> None:
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
