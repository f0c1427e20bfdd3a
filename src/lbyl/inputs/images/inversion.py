"""Images that the network itself asks for: procedural ones, changed until BatchNorm agrees.

Every BatchNorm keeps the mean and variance of its input on the training data; gradient steps on the
*images* (never on the weights) bring what it sees now close to them. They are matched over the
whole set and not batch by batch, and only as far as BatchNorms that take no part agree: every
fourth is held out, and the images of the step at which those agree best are the ones returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.watch import NormCall, Watch
from lbyl.runtime.recording import Recorded, Run
from lbyl.runtime.run import Progress, evaluation_mode

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

    weights: list[Tensor]  # scalars
    moments: list[list[Tensor]]  # of each batch: a mean and a mean square for every BatchNorm

    def others(self, batch: int) -> list[Tensor]:
        """What the other batches give to the moments of the whole set."""
        made = [torch.zeros_like(m) for m in self.moments[batch]]
        for i, (weight, moments) in enumerate(zip(self.weights, self.moments)):
            if i != batch:
                torch._foreach_add_(made, torch._foreach_mul(moments, weight))
        return made

    def update(self, batch: int, moments: Sequence[Tensor | None]) -> None:
        for own, new in zip(self.moments[batch], moments):
            assert new is not None
            own.copy_(new)


@dataclass(frozen=True)
class Matching:
    """How far one batch, with the others as they are, leaves BatchNorms from agreeing."""

    model: nn.Module
    hold: bool  # whether some BatchNorms take no part
    objective: Callable[[Any], Tensor] | None

    def __call__(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """From images, their weight and the others' moments: the gradient of the images, what
        every BatchNorm disagrees by, and the moments of these images."""
        given, weight, *others = inputs
        images = given.detach().requires_grad_(True)
        seen, output = _seen(self.model, images)
        _check_alike(moments_of(seen), others)
        terms = []
        for own, mean, square in zip(seen, others[::2], others[1::2]):
            joined = replace(
                own, mean=weight * own.mean + mean, square=weight * own.square + square
            )
            terms.append(disagreement(joined))
        loss = torch.stack(
            [t for n, t in enumerate(terms) if not (self.hold and _is_held(n))]
        ).sum()
        if self.objective is not None:
            loss = loss + self.objective(output)
        # The gradient is asked for the images alone, as large as if they were the set.
        gradient = torch.autograd.grad(loss, images)[0] / weight
        return [gradient, torch.stack(terms).detach(), *moments_of(seen)]


def moments_of(seen: Sequence[Seen]) -> list[Tensor]:
    """A mean and a mean square for every BatchNorm, in this order."""
    return [m.detach() for s in seen for m in (s.mean, s.square)]


def _check_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """One clear error where values decide which BatchNorms images come to."""
    if [x.shape for x in some] != [x.shape for x in others]:
        raise LbylError("data='inversion' needs the same BatchNorms to run for all images")


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
    images = [x.detach().clone() for x in batches]
    total = sum(len(x) for x in images)
    with evaluation_mode(model), torch.no_grad():
        moments = [moments_of(_seen(model, x)[0]) for x in images]
    if not moments[0]:
        raise LbylError("data='inversion' needs a network with BatchNorm")
    for others in moments[1:]:
        _check_alike(moments[0], others)
    pool = Pool([x.new_tensor(len(x) / total) for x in images], moments)
    hold = objective is None and len(moments[0]) // 2 >= FEWEST_NORMS
    match: Run = Matching(model, hold, objective)
    if objective is None:  # one that is given may be of each batch its own
        match = Recorded(match)
    optimisers = [torch.optim.Adam([x], lr=rate) for x in images]
    best, least, without_gain = list(batches), float("inf"), 0
    with evaluation_mode(model), torch.enable_grad():
        for step in range(steps):
            looking = hold and step % LOOK == 0
            before = [x.clone() for x in images] if looking else []
            for i, (batch, optimiser) in enumerate(zip(images, optimisers)):
                made = match((batch, pool.weights[i], *pool.others(i)))
                gradient, terms, *moments_now = made
                pool.update(i, moments_now)
                batch.grad = gradient
                optimiser.step()
            if progress:
                progress("inverting", step + 1, steps)
            if looking:
                assert terms is not None
                left_out = float(terms[HELD_OUT - 1 :: HELD_OUT].sum())
                without_gain += 1
                if left_out < least:
                    best, least, without_gain = before, left_out, 0
                if without_gain >= PATIENCE:
                    break
    return best if hold else images


def _is_held(norm: int) -> bool:
    return norm % HELD_OUT == HELD_OUT - 1


def _seen(model: nn.Module, images: Tensor) -> tuple[list[Seen], Any]:
    watch = NormInputs()
    with watch:
        output = model(images)
    return watch.seen, output
