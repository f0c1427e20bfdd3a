"""Images that the network itself asks for: procedural ones, changed until BatchNorm agrees.

Every BatchNorm keeps the mean and variance of its input on the training data; gradient steps on the
*images* (never on the weights) bring what it sees now close to them. They are matched over the
whole set and not batch by batch, and only as far as BatchNorms that take no part agree: every
fourth is held out, and the images of the step at which those agree best are the ones returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.watch import NormCall, Watch
from lbyl.torchkit.run import Progress, evaluation_mode

STEPS, RATE = 200, 0.05
HELD_OUT, FEWEST_NORMS = 4, 8  # every fourth BatchNorm, where there are enough
LOOK, PATIENCE = 5, 6  # steps between two looks at those held out, looks without a gain


@dataclass(frozen=True)
class Seen:
    """First and second moments at the input of one BatchNorm, and its running statistics."""

    mean: Tensor
    square: Tensor
    running_mean: Tensor
    running_var: Tensor


class NormInputs(Watch):
    """Notes what enters every BatchNorm, in the order they run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def before_norm(self, call: NormCall) -> None:
        if call.mean is None or call.var is None:
            return
        dims = [d for d in range(call.x.dim()) if d != 1]
        variance, mean = torch.var_mean(call.x, dims, correction=0)
        self.seen.append(Seen(mean, variance + mean.square(), call.mean, call.var))


def disagreement(seen: Seen) -> Tensor:
    """How far mean and standard deviation are from the running ones, in standard deviations."""
    std = (seen.running_var + 1e-5).sqrt()
    variance = (seen.square - seen.mean.square()).clamp(min=0)
    shift = ((seen.mean - seen.running_mean) / std).square().mean()
    return shift + ((variance + 1e-5).sqrt() / std - 1).square().mean()


@dataclass
class Pool:
    """Moments of all batches at every BatchNorm, each weighted by its number of images."""

    weights: list[float]
    moments: list[list[Seen]] = field(default_factory=list)  # of each batch, detached

    def joined(self, batch: int, seen: list[Seen]) -> list[Seen]:
        """Moments over the whole set, those of one batch as it is now."""
        made = []
        for layer, own in enumerate(seen):
            parts = [own if i == batch else m[layer] for i, m in enumerate(self.moments)]
            mean = sum(w * p.mean for w, p in zip(self.weights, parts))
            square = sum(w * p.square for w, p in zip(self.weights, parts))
            assert isinstance(mean, Tensor) and isinstance(square, Tensor)
            made.append(Seen(mean, square, own.running_mean, own.running_var))
        return made

    def update(self, batch: int, seen: list[Seen]) -> None:
        self.moments[batch] = [
            Seen(s.mean.detach(), s.square.detach(), s.running_mean, s.running_var) for s in seen
        ]


def invert(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    steps: int = STEPS,
    rate: float = RATE,
    objective: Callable[[Any], Tensor] | None = None,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Images near the given ones whose statistics at every BatchNorm are its running statistics.

    `objective` is a further loss of the network's output, such as the cross-entropy of classes
    that the images are to be taken for; with one all BatchNorms are matched, for all steps.
    """
    images = [x.detach().clone().requires_grad_(True) for x in batches]
    total = sum(len(x) for x in images)
    pool = Pool([len(x) / total for x in images])
    with evaluation_mode(model), torch.no_grad():
        pool.moments = [_seen(model, x)[0] for x in images]
    if not pool.moments[0]:
        raise LbylError("data='inversion' needs a network with BatchNorm")
    hold = objective is None and len(pool.moments[0]) >= FEWEST_NORMS
    optimisers = [torch.optim.Adam([x], lr=rate) for x in images]
    best, least, without_gain = list(batches), float("inf"), 0
    with evaluation_mode(model), torch.enable_grad():
        for step in range(steps):
            before = [x.detach().clone() for x in images] if hold and step % LOOK == 0 else []
            left_out = 0.0
            for i, (batch, optimiser) in enumerate(zip(images, optimisers)):
                seen, output = _seen(model, batch)
                terms = [disagreement(s) for s in pool.joined(i, seen)]
                pool.update(i, seen)
                matched = [t for n, t in enumerate(terms) if not (hold and _is_held(n))]
                loss = torch.stack(matched).sum()
                if objective is not None:
                    loss = loss + objective(output)
                left_out = sum(float(t.detach()) for n, t in enumerate(terms) if _is_held(n))
                # The gradient is asked for the images alone, as large as if they were the set.
                batch.grad = torch.autograd.grad(loss, batch)[0] / pool.weights[i]
                optimiser.step()
            if progress:
                progress("inverting", step + 1, steps)
            if hold and step % LOOK == 0:
                without_gain += 1
                if left_out < least:
                    best, least, without_gain = before, left_out, 0
                if without_gain >= PATIENCE:
                    break
    return best if hold else [x.detach() for x in images]


def _is_held(norm: int) -> bool:
    return norm % HELD_OUT == HELD_OUT - 1


def _seen(model: nn.Module, images: Tensor) -> tuple[list[Seen], Any]:
    watch = NormInputs()
    with watch:
        output = model(images)
    return watch.seen, output
