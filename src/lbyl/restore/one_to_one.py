"""`one-to-one`: a pruned neuron's outgoing weights are added to its nearest kept neuron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lbyl.restore.base import Delivery, Method, identity_rows, methods, pruned_of

if TYPE_CHECKING:
    from lbyl.statistics import Statistics
    from lbyl.weights import UnitWeights


@methods.register("one-to-one")
@dataclass(frozen=True)
class OneToOne(Method):
    """Least saliency ⟨v_j²⟩·‖f_j − f_k‖²: for a given j that is the nearest filter.

    Filters are compared as the activation sees them, normalisation folded in.
    """

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        matrix = identity_rows(weights.unit.channels, kept, weights.filters)
        gone = pruned_of(weights.unit.channels, kept).to(matrix.device)
        if len(gone):
            filters = weights.folded
            saliency = weights.readers[gone].square().mean(1, keepdim=True)
            saliency = saliency * torch.cdist(filters[gone], filters[kept.to(gone.device)]) ** 2
            best = saliency.argmin(1, keepdim=True)
            matrix[gone] = torch.zeros_like(matrix[gone]).scatter(1, best, 1.0)
        return Delivery(matrix)
