"""Choosing channels by the error that pruning them adds once the kept ones are refitted.

Backward elimination: of all channels left, the one is pruned whose removal costs least after the
best linear delivery, then the next. With H = (C + εI)⁻¹ and M = VᵀV, removing channel j costs
M_jj / H_jj; both change by few ranks at a removal, and changes are applied in blocks.

Each cost is weighted by the fourth power of the channel's filter norm. Under weight decay, a filter
that BatchNorm normalises comes to a norm whose fourth power is proportional to its mean squared
gradient: the norm shows how much the training loss depended on the filter, which no procedural
image can show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.graph.weights import UnitWeights, as_matrix
from lbyl.planning.criteria import Criterion, register
from lbyl.statistics.moments import Statistics
from lbyl.statistics.solve import RIDGE, ridge_inverse
from lbyl.statistics.units import measured_consumers


@dataclass(frozen=True)
class ConsumerView:
    """Second moments of a unit's channels, and of the weights by which consumers multiply them."""

    covariance: Tensor  # (m, m)
    weight: Tensor  # (m, m): VᵀV summed over consumers and taps


def consumer_view(weights: UnitWeights, statistics: Statistics) -> ConsumerView | None:
    """Covariance of a unit's channels and the Gram matrix of all that multiplies them."""
    covariance, gram = None, None
    for consumer, moments, index in measured_consumers(weights, statistics):
        _, measured = moments.channel_level()
        matrix = moments.arrange(as_matrix(weights.state[consumer.weight], consumer))
        rows = matrix.to(measured)[:, index].transpose(1, 2).flatten(0, 1)  # (outputs · taps, m)
        part = rows.T @ rows
        gram = part if gram is None else gram + part
        if covariance is None:
            covariance = measured[index][:, index]
    return None if covariance is None or gram is None else ConsumerView(covariance, gram)


BLOCK = 64  # removals after which all pending changes are applied at once


def eliminate(
    view: ConsumerView, importance: Tensor, ridge: float = RIDGE
) -> list[tuple[int, float]]:
    """Channels in the order they are pruned, each with what it adds to the error.

    With H = (C + εI)⁻¹ and M = VᵀV a removal changes both by few ranks:
    H ← H − u uᵀ with u = H_j/√H_jj, and M ← M − s bᵀ − b sᵀ with s = H_j/H_jj and
    b = M_j − s M_jj/2. Changes wait until a block of them is applied in one product; meanwhile
    diagonals are kept up to date and rows are worked out when asked for.
    """
    size = len(view.covariance)
    inverse, gram = _inverse(view.covariance.double(), ridge), view.weight.double().clone()
    importance = importance.to(gram)
    pruned = torch.zeros(size, dtype=torch.bool, device=gram.device)
    diagonals = torch.stack([gram.diagonal(), inverse.diagonal()])  # of M and H
    order: list[tuple[int, float]] = []
    while len(order) < size - 1:
        steps = min(BLOCK, size - 1 - len(order))
        u, s, b = (gram.new_zeros(steps, size) for _ in range(3))
        for k in range(steps):
            cost = diagonals[0] / diagonals[1].clamp(min=1e-300)
            # A cost that rounding made no number is dear: every channel is named once.
            price = (importance * cost).nan_to_num(nan=1e300, posinf=1e300, neginf=-1e300)
            j = int(price.masked_fill(pruned, torch.inf).argmin())
            order.append((j, float(cost[j])))
            row = inverse[j] - u[:k, j] @ u[:k]
            column = gram[j] - s[:k, j] @ b[:k] - b[:k, j] @ s[:k]
            pivot = row[j].clamp(min=1e-300)
            u[k], s[k] = row / pivot.sqrt(), row / pivot
            b[k] = column - s[k] * (column[j] / 2)
            diagonals[0] -= 2 * s[k] * b[k]
            diagonals[1] -= u[k].square()
            pruned[j] = True
        inverse -= u.T @ u
        gram -= s.T @ b + b.T @ s
    return order


def _inverse(covariance: Tensor, ridge: float) -> Tensor:
    """(C + εI)⁻¹, ε relative to the mean variance; of the positive part if rounding left none."""
    epsilon = ridge * covariance.diagonal().mean().clamp(min=1e-280)
    eye = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    root, failed = torch.linalg.cholesky_ex(covariance + epsilon * eye)
    if not int(failed):
        return torch.cholesky_inverse(root)
    inverse = ridge_inverse(covariance, ridge)
    return eye if inverse is None or not bool((inverse.diagonal() > 0).all()) else inverse


@register("echo")
@dataclass(frozen=True)
class EchoCriterion(Criterion):
    """Backward elimination on collected statistics, weighted by the filter norm to a power."""

    power: float = 4.0
    needs_statistics: ClassVar[bool] = True

    def select(self, weights: UnitWeights, count: int, statistics: Statistics | None) -> Tensor:
        if statistics is None:
            raise LbylError("criterion 'echo' needs statistics, and none were collected")
        order = self.order(weights, statistics)
        pruned = [j for j, _ in order[: weights.unit.channels - count]]
        kept = torch.ones(weights.unit.channels, dtype=torch.bool)
        kept[pruned] = False
        return torch.nonzero(kept).reshape(-1)

    def order(self, weights: UnitWeights, statistics: Statistics) -> list[tuple[int, float]]:
        """All removals of a unit but the last channel's, with their costs; worked out once."""
        key = (weights.unit.name, self.power)
        if key not in statistics.orders:
            statistics.orders[key] = self._order(weights, statistics)
        return statistics.orders[key]

    def _order(self, weights: UnitWeights, statistics: Statistics) -> list[tuple[int, float]]:
        view = consumer_view(weights, statistics)
        norms = weights.criterion_filters.norm(dim=1)
        if view is None:  # nothing measured: only the norm
            ranked = torch.argsort(norms, stable=True)[:-1].tolist()
            return [(j, 0.0) for j in ranked]
        importance = (norms / norms.max().clamp(min=1e-30)) ** self.power
        return eliminate(view, importance.to(view.covariance.device))
