"""`one-to-one`: a pruned neuron's outgoing weights are added to its nearest kept neuron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.methods.base import Delivery, Method, identity_rows, registry
from lbyl.surgery.indices import pruned_of

if TYPE_CHECKING:
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Statistics


@registry.register("one-to-one")
@dataclass(frozen=True)
class OneToOne(Method):
    """Least saliency ⟨v_j²⟩·‖f_j − f_k‖²: for a given j that is the nearest filter.

    Filters are compared as the activation sees them, normalisation folded in.
    """

    restores_duplicates: ClassVar[bool] = True

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        matrix = identity_rows(weights.unit.channels, kept, weights.filters)
        pruned = pruned_of(weights.unit.channels, kept).to(matrix.device)
        if len(pruned):
            filters = weights.folded
            distance = torch.cdist(filters[pruned], filters[kept.to(pruned.device)])
            best = distance.argmin(1, keepdim=True)
            matrix[pruned] = torch.zeros_like(matrix[pruned]).scatter(1, best, 1.0)
        return Delivery(matrix)
