"""Images that the network itself asks for: procedural ones, changed until BatchNorm agrees.

A slower optional source. Every BatchNorm remembers the mean and variance of its input on the
training data; gradient steps on the *images* (never on the weights) bring what it sees now close to
what it remembers. No data is used, only the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.exceptions import LbylError
from lbyl.listen import Function, Listener
from lbyl.record import evaluation_mode

STEPS, RATE = 60, 0.05


class Disagreement(Listener):
    """Sums how far each BatchNorm's input is from its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: list[Tensor] = []

    def hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.batch_norm and args[1] is not None:
            x, mean, var = args[:3]
            spread, middle = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
            deviation = (var + 1e-5).sqrt()
            self.terms.append((((middle - mean) / deviation) ** 2).mean())
            self.terms.append((((spread + 1e-5).sqrt() / deviation - 1) ** 2).mean())
        return func(*args, **kwargs)


def invert(
    model: nn.Module,
    images: Tensor,
    *,
    steps: int = STEPS,
    rate: float = RATE,
    objective: Callable[[Any], Tensor] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Tensor:
    """Images near the given ones on which the network's BatchNorms see what they remember.

    `objective` is a further loss of the network's output, such as the cross-entropy of classes
    that the images are to be taken for.
    """
    images = images.detach().clone().requires_grad_(True)
    optimiser = torch.optim.Adam([images], lr=rate)
    with evaluation_mode(model), torch.enable_grad():
        for step in range(steps):
            listener = Disagreement()
            with listener:
                output = model(images)
            if not listener.terms:
                raise LbylError("images='inversion' needs a network with BatchNorm")
            # The gradient is asked for the images alone, so parameters keep theirs.
            loss = torch.stack(listener.terms).sum()
            if objective is not None:
                loss = loss + objective(output)
            images.grad = torch.autograd.grad(loss, images)[0]
            optimiser.step()
            if progress:
                progress("inverting", step + 1, steps)
    return images.detach()
