"""What networks answer, and how far two answers are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lbyl.runtime.run import dense, tensors_in

SCORES = 1 << 25  # of a vocabulary's scores, which are many, so many are kept
HALVINGS = 40  # of a range of temperatures,
STEPS = 16  # of which a device looks at so many parts in one go
SUM_TO_ONE, LEAST_CHANCE = 1e-3, 1e-8


def numbers_in(out: Any) -> list[Tensor]:
    """Every floating tensor of an output, in float64; chances as the scores they were made of."""
    return [as_scores(x.double()) for x in floating_in(out)]


def as_scores(x: Tensor) -> Tensor:
    """Rows that are chances, as networks with a softmax at their end give, as their logarithms.

    Chances of a network that is sure differ in digits that nobody compares. Nothing is read back
    from a device to find out.
    """
    if x.dim() != 2 or x.shape[1] < 2:
        return x
    chances = (x >= 0).all() & ((x.sum(1) - 1).abs() < SUM_TO_ONE).all()
    return torch.where(chances, x.clamp(min=LEAST_CHANCE).log(), x)


def floating_in(out: Any) -> list[Tensor]:
    """Every floating tensor of an output."""
    return [dense(x) for x in tensors_in(out) if x.is_floating_point() and x.dim()]


def thinned(rows: Tensor, limit: int) -> Tensor:
    """Rows at even distances, so that they hold about so many numbers."""
    return rows[:: max(1, math.ceil(rows.numel() / max(1, limit)))]


def is_answer(out: list[Tensor]) -> bool:
    """Whether an output is one vector of scores an example, as a classifier's is."""
    return len(out) == 1 and out[0].dim() == 2 and out[0].shape[1] > 1 and len(out[0]) > 0


def joined_scores(batches: Sequence[list[Tensor]]) -> Tensor | None:
    """(n, classes): scores of all batches; None where an output is not one vector an example."""
    if not batches or not all(is_answer(out) for out in batches):
        return None
    return torch.cat([out[0] for out in batches])


def kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """(n,): Kullback–Leibler divergence of the student's softmax from the teacher's."""
    p, q = (F.log_softmax(x / temperature, 1) for x in (teacher, student))
    return (p.exp() * (p - q)).sum(1)


def relative_error(teacher: list[Tensor], student: list[Tensor]) -> Tensor:
    """(1,): squared error relative to the variance, the mean over outputs.

    Sizes that depend on values (how long speech is, how many matches are found) differ between
    networks that are both right: such outputs are compared as far as both go.
    """
    pairs = [_common(t, s) for t, s in zip(teacher, student) if t.dim() == s.dim()]
    pairs = [(t, s) for t, s in pairs if t.numel()]
    if not pairs:
        return torch.full((1,), math.inf)
    parts = [(t - s).square().mean() / t.var(correction=0).clamp(min=1e-300) for t, s in pairs]
    return torch.stack(parts).mean()[None].cpu()


def _common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both as far as they go together along every dimension."""
    if one.shape == other.shape:
        return one, other
    region = tuple(slice(min(a, b)) for a, b in zip(one.shape, other.shape))
    return one[region], other[region]


def half_sure(scores: Tensor) -> float:
    """The temperature at which the mean entropy of answers is half of the greatest.

    It makes the divergence independent of the scale of scores, which differs between networks.
    """
    aim = 0.5 * math.log(scores.shape[1])
    scale = (scores - scores.mean(1, keepdim=True)).std().clamp(min=1e-30)
    low, high = torch.full_like(scale, -20.0), torch.full_like(scale, 20.0)  # in logarithms
    steps = STEPS if scores.is_cuda else 2
    each = torch.arange(steps + 1, dtype=scale.dtype, device=scale.device) / steps
    for _ in range(HALVINGS // int(math.log2(steps))):
        tried = low + each * (high - low)
        p = F.log_softmax(scores / (scale * tried[1:-1].exp())[:, None, None], 2)
        at = (-(p.exp() * p).sum(2).mean(1) < aim).sum()  # entropy grows with the temperature
        low, high = tried[at], tried[at + 1]
    return float(scale * ((low + high) / 2).exp())
