"""Choosing channels by what their loss costs once the others have taken over.

Backward elimination: of all channels left, the one goes whose removal costs least after the best
linear repair, then the next. With H = (C + εI)⁻¹ and M = VᵀV, removing channel j costs M_jj / H_jj;
both are kept up to date by rank-one steps, so a unit of m channels takes O(m²) per removal.

Each cost is weighted by the fourth power of the channel's filter norm. Under weight decay, a filter
that BatchNorm normalises settles at a norm whose fourth power is proportional to its mean squared
gradient: the norm remembers how much the training loss depended on the filter, which no
procedural image can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lbyl.criteria import Criterion, criteria
from lbyl.exceptions import LbylError
from lbyl.restore.echo import RIDGE, measured_readers
from lbyl.statistics.base import Statistics
from lbyl.surgery import as_matrix
from lbyl.weights import UnitWeights


@dataclass(frozen=True)
class Reach:
    """A unit's channels as its readers see them."""

    covariance: Tensor  # (m, m)
    weight: Tensor  # (m, m): VᵀV summed over readers and taps


def reach(weights: UnitWeights, statistics: Statistics) -> Reach | None:
    """Covariance of a unit's channels and the Gram matrix of all that multiplies them."""
    covariance, gram = None, None
    for consumer, moments, places in measured_readers(weights, statistics):
        _, found = moments.channel_level()
        matrix = moments.arrange(as_matrix(weights.state[consumer.weight], consumer))
        rows = matrix.to(found)[:, places].transpose(1, 2).flatten(0, 1)  # (outputs · taps, m)
        part = rows.T @ rows
        gram = part if gram is None else gram + part
        if covariance is None:
            covariance = found[places][:, places]
    return None if covariance is None or gram is None else Reach(covariance, gram)


def eliminate(
    found: Reach, importance: Tensor, ridge: float = RIDGE
) -> Iterator[tuple[int, float]]:
    """Yield channels in the order they go, each with what its loss adds to the squared error."""
    size = len(found.covariance)
    epsilon = ridge * found.covariance.diagonal().mean().clamp(min=1e-30)
    eye = torch.eye(size, dtype=torch.float64, device=found.covariance.device)
    inverse = torch.linalg.inv(found.covariance.double() + epsilon * eye)
    gram = found.weight.double().clone()
    gone = torch.zeros(size, dtype=torch.bool, device=gram.device)
    for _ in range(size - 1):
        cost = gram.diagonal() / inverse.diagonal().clamp(min=1e-30)
        j = int((importance * cost).masked_fill(gone, torch.inf).argmin())
        yield j, float(cost[j])
        share = inverse[j] / inverse[j, j]  # V loses v_j and gains v_j · share elsewhere
        column = gram[:, j].clone()
        gram -= torch.outer(share, column) + torch.outer(column, share)
        gram += column[j] * torch.outer(share, share)
        inverse -= torch.outer(inverse[j], share)
        for matrix in (gram, inverse):
            matrix[j] = 0
            matrix[:, j] = 0
        inverse[j, j] = 1
        gone[j] = True


@criteria.register("echo")
@dataclass(frozen=True)
class EchoCriterion(Criterion):
    """Backward elimination on collected statistics, weighted by the filter norm to a power."""

    power: float = 4.0
    needs_statistics: ClassVar[bool] = True

    def select(self, weights: UnitWeights, count: int, statistics: Statistics | None) -> Tensor:
        if statistics is None:
            raise LbylError("criterion 'echo' needs statistics: pass statistics=lbyl.collect(...)")
        order = self.order(weights, statistics)
        gone = [j for j, _ in order[: weights.unit.channels - count]]
        stays = torch.ones(weights.unit.channels, dtype=torch.bool)
        stays[gone] = False
        return torch.nonzero(stays).reshape(-1)

    def order(self, weights: UnitWeights, statistics: Statistics) -> list[tuple[int, float]]:
        """All removals of a unit but the last channel's, with their costs."""
        found = reach(weights, statistics)
        norms = weights.criterion_filters.norm(dim=1)
        if found is None:  # nothing measured: the norm alone
            ranked = torch.argsort(norms, stable=True)[:-1].tolist()
            return [(j, 0.0) for j in ranked]
        importance = (norms / norms.max().clamp(min=1e-30)) ** self.power
        return list(eliminate(found, importance.to(found.covariance.device)))
