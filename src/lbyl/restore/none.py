"""`none`: pruned channels are gone, nothing is given back (the papers' "Prune")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lbyl.restore.base import Delivery, Method, Reading, identity_rows, methods

if TYPE_CHECKING:
    from lbyl.statistics import Statistics
    from lbyl.weights import UnitWeights


@methods.register("none")
@dataclass(frozen=True)
class Prune(Method):
    """Deliver nothing."""

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        like = weights.state[weights.unit.producers[0].weight]
        return Delivery(identity_rows(weights.unit.channels, kept, like))

    def rewrite(self, reading: Reading) -> Tensor:
        """The kept columns as they are: a product with the identity would only take time."""
        return reading.weight[:, reading.alive.to(reading.weight.device)]
