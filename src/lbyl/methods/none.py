"""`none`: pruned channels are cut out, nothing is given back (the papers' "Prune")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lbyl.methods.base import Delivery, Method, Rewrite, identity_rows, registry

if TYPE_CHECKING:
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Statistics


@registry.register("none")
@dataclass(frozen=True)
class Prune(Method):
    """Deliver nothing."""

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        like = weights.state[weights.unit.producers[0].weight]
        return Delivery(identity_rows(weights.unit.channels, kept, like))

    def rewrite(self, rewrite: Rewrite) -> Tensor:
        """The kept columns as they are: a product with the identity would only take time."""
        return rewrite.weight[:, rewrite.kept_columns.to(rewrite.weight.device)]
