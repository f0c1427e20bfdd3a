"""`coreset`: channels drawn by their sensitivity, weighted by how often they were drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.methods.base import Delivery, Method, registry

if TYPE_CHECKING:
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Statistics


@registry.register("coreset")
@dataclass(frozen=True)
class Coreset(Method):
    """Draw with probability ∝ max_o|V[o, i]| · ‖f_i‖ until enough distinct channels are drawn.

    It chooses the channels itself, so no criterion is used. A channel drawn n times of N with
    probability p has its outgoing weights times n/(pN), which is unbiased.
    """

    seed: int = 0
    chooses: ClassVar[bool] = True

    def _probabilities(self, weights: UnitWeights) -> Tensor:
        sensitivity = weights.consumer_weights.abs().amax(1) * weights.folded.norm(dim=1)
        sensitivity = sensitivity.cpu().clamp(
            min=1e-12 * float(sensitivity.max().clamp(min=1e-300))
        )
        return sensitivity / sensitivity.sum()

    def _draws(self, weights: UnitWeights, count: int) -> Tensor:
        """(m,): how often each channel was drawn when the `count`-th distinct one came."""
        probabilities = self._probabilities(weights)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + weights.unit.start)
        drawn = torch.multinomial(probabilities, 64 * count, True, generator=generator)
        while len(torch.unique(drawn)) < count:
            more = torch.multinomial(probabilities, len(drawn), True, generator=generator)
            drawn = torch.cat([drawn, more])
            if len(drawn) > 1 << 19:  # channels that are all but never drawn: take the largest
                rest = torch.argsort(probabilities, descending=True, stable=True)
                drawn = torch.cat([drawn, rest[~torch.isin(rest, drawn)]])
        ordered = torch.arange(len(drawn))
        first = torch.full((len(probabilities),), len(drawn)).scatter_reduce(
            0, drawn, ordered, "amin"
        )
        last = int(first.sort().values[count - 1])
        return torch.bincount(drawn[: last + 1], minlength=len(probabilities))

    def select(self, weights: UnitWeights, count: int) -> Tensor:
        if count == weights.unit.channels:
            return torch.arange(count)
        return torch.nonzero(self._draws(weights, count)).reshape(-1)

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        matrix = torch.zeros(weights.unit.channels, len(kept), dtype=torch.float64)
        factors = torch.ones(len(kept), dtype=torch.float64)
        if len(kept) < weights.unit.channels:
            draws = self._draws(weights, len(kept)).double()
            # Under a plan made otherwise nothing was drawn, so there is nothing to weigh by.
            if torch.equal(torch.nonzero(draws).reshape(-1), kept.cpu()):
                factors = (draws / (self._probabilities(weights) * draws.sum()))[kept.cpu()]
        matrix[kept.cpu(), torch.arange(len(kept))] = factors
        return Delivery(matrix.to(weights.device))
