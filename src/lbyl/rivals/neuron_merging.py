"""`neuron-merging`: each pruned filter is given to the one kept filter that it is most like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.methods.base import Delivery, Method, identity_rows, registry
from lbyl.surgery.indices import pruned_of

if TYPE_CHECKING:
    from lbyl.graph.weights import NormWeights, UnitWeights
    from lbyl.statistics.moments import Statistics


TINY = 1e-6  # a γ below it switches a channel off, and cannot be divided by
SHORTEST = 1e-30  # a filter no longer than this is taken for zeros


@registry.register("neuron-merging")
@dataclass(frozen=True)
class NeuronMerging(Method):
    """Score = balance · cosine distance + (1 − balance) · bias distance; the least receives.

    `corrected` scales as the derivation says; `released` is the published code, whose scale is
    the reciprocal and whose σ is the running variance. The threshold on cosine similarity is by
    default 0.1 behind BatchNorm and 0.45 without, as published. A channel that its normalisation
    has switched off carries nothing: it neither gives nor receives; nor does a filter of zeros.
    """

    balance: float = 0.85
    threshold: float | None = None
    variant: str = "corrected"

    restores_duplicates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
        pruned = pruned_of(weights.unit.channels, kept).to(matrix.device)
        if not len(pruned):
            return Delivery(matrix)
        kept = kept.to(matrix.device)
        lengths = filters.norm(dim=1).clamp(min=SHORTEST)
        cosine = (filters[pruned] @ filters[kept].T) / (lengths[pruned, None] * lengths[kept])
        scale = lengths[pruned, None] / lengths[kept]
        score = 1 - cosine
        if norm is not None:
            scale, distance = self._scale(norm, scale, kept, pruned)
            score = self.balance * score + (1 - self.balance) * normalised(distance)
            off = self._switched_off(norm)
            score = score.masked_fill(off[kept], torch.inf)
            scale = scale.masked_fill(off[pruned, None] | off[kept], 0.0)
        dead = lengths[kept] <= SHORTEST
        if bool(dead.any()):
            score, scale = score.masked_fill(dead, torch.inf), scale.masked_fill(dead, 0.0)
        best = score.argmin(1, keepdim=True)
        limit = self.threshold if self.threshold is not None else (0.45 if norm is None else 0.1)
        given = torch.where(cosine.gather(1, best) >= limit, scale.gather(1, best), 0.0)
        matrix[pruned] = torch.zeros_like(scale).scatter(1, best, given)
        return Delivery(matrix)

    def _switched_off(self, norm: NormWeights) -> Tensor:
        off = norm.gamma.abs() < TINY
        return off | (norm.var < 1e-12) if self.variant == "released" else off

    def _scale(
        self, norm: NormWeights, scale: Tensor, kept: Tensor, pruned: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What to deliver, and how far the constants are apart: both (pruned, kept)."""
        released = self.variant == "released"
        sigma = norm.var.clamp(min=1e-12) if released else norm.sigma
        gamma = torch.where(norm.gamma.abs() < 1e-12, torch.full_like(sigma, 1e-12), norm.gamma)
        g = gamma / sigma
        top, bottom = (g[kept], g[pruned, None]) if released else (g[pruned, None], g[kept])
        delivered = scale * top / bottom
        centre = (norm.mean - norm.beta / g)[pruned, None]
        shift = g[kept] * (scale * centre - norm.mean[kept]) + norm.beta[kept]
        divisor = torch.where(delivered.abs() < 1e-30, torch.full_like(delivered, 1e-30), delivered)
        return delivered, shift.abs() / divisor


def normalised(x: Tensor) -> Tensor:
    """Each row stretched to 0…1."""
    low, high = x.min(1, keepdim=True).values, x.max(1, keepdim=True).values
    return (x - low) / (high - low).clamp(min=1e-30)
