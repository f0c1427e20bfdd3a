"""`neuron-merging`: each pruned filter is given to the one kept filter that it is most like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lbyl.exceptions import LbylError
from lbyl.restore.base import Delivery, Method, identity_rows, methods, pruned_of

if TYPE_CHECKING:
    from lbyl.statistics import Statistics
    from lbyl.weights import NormWeights, UnitWeights

TINY = 1e-6  # a γ below it switches a channel off, and cannot be divided by


@methods.register("neuron-merging")
@dataclass(frozen=True)
class NeuronMerging(Method):
    """Score = balance · cosine distance + (1 − balance) · bias distance; the least receives.

    `corrected` scales as the derivation says; `released` is the published code, whose scale is
    the reciprocal and whose σ is the running variance. The threshold on cosine similarity is by
    default 0.1 behind BatchNorm and 0.45 without, as published. A channel that its normalisation
    has switched off carries nothing: it neither gives nor receives.
    """

    balance: float = 0.85
    threshold: float | None = None
    variant: str = "corrected"

    def __post_init__(self) -> None:
        if not 0 <= self.balance <= 1:
            raise LbylError(f"neuron-merging's balance is {self.balance}: it must be 0 to 1")
        if self.variant not in ("corrected", "released"):
            raise LbylError(
                f"neuron-merging has no variant {self.variant!r}: use 'corrected' or 'released'"
            )

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        norm = weights.norm
        filters = weights.filters_with_bias if norm is None else weights.filters
        matrix = identity_rows(weights.unit.channels, kept, filters)
        gone = pruned_of(weights.unit.channels, kept).to(matrix.device)
        if not len(gone):
            return Delivery(matrix)
        stay = kept.to(matrix.device)
        lengths = filters.norm(dim=1).clamp(min=1e-30)
        cosine = (filters[gone] @ filters[stay].T) / (lengths[gone, None] * lengths[stay])
        scale = lengths[gone, None] / lengths[stay]
        score = 1 - cosine
        if norm is not None:
            scale, distance = self._scale(norm, scale, stay, gone)
            score = self.balance * score + (1 - self.balance) * normalised(distance)
            off = self._switched_off(norm)
            score = score.masked_fill(off[stay], torch.inf)
            scale = scale.masked_fill(off[gone, None] | off[stay], 0.0)
        best = score.argmin(1, keepdim=True)
        limit = self.threshold if self.threshold is not None else (0.45 if norm is None else 0.1)
        given = torch.where(cosine.gather(1, best) >= limit, scale.gather(1, best), 0.0)
        matrix[gone] = torch.zeros_like(scale).scatter(1, best, given)
        return Delivery(matrix)

    def _switched_off(self, norm: NormWeights) -> Tensor:
        off = norm.gamma.abs() < TINY
        return off | (norm.var < 1e-12) if self.variant == "released" else off

    def _scale(
        self, norm: NormWeights, scale: Tensor, stay: Tensor, gone: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What to deliver, and how far the constants are apart: both (pruned, kept)."""
        released = self.variant == "released"
        sigma = norm.var.clamp(min=1e-12) if released else norm.sigma
        gamma = torch.where(norm.gamma.abs() < 1e-12, torch.full_like(sigma, 1e-12), norm.gamma)
        g = gamma / sigma
        top, bottom = (g[stay], g[gone, None]) if released else (g[gone, None], g[stay])
        delivered = scale * top / bottom
        centre = (norm.mean - norm.beta / g)[gone, None]
        shift = g[stay] * (scale * centre - norm.mean[stay]) + norm.beta[stay]
        divisor = torch.where(delivered.abs() < 1e-30, torch.full_like(delivered, 1e-30), delivered)
        return delivered, shift.abs() / divisor


def normalised(x: Tensor) -> Tensor:
    """Each row stretched to 0…1."""
    low, high = x.min(1, keepdim=True).values, x.max(1, keepdim=True).values
    return (x - low) / (high - low).clamp(min=1e-30)
