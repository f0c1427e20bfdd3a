"""Choosing channels by the error that pruning them adds once the kept ones are refitted.

Backward elimination: of all channels left, the one is pruned whose removal costs least after the
best linear delivery, then the next. With H = (C + εI)⁻¹ and M = VᵀV, removing channel j costs
M_jj / H_jj; both change by few ranks at a removal, and changes are applied in blocks.

Where BatchNorm normalises filters, each cost is weighted by the fourth power of the filter's norm.
Under weight decay such a filter comes to a norm whose fourth power is proportional to its mean
squared gradient: the norm shows how much the training loss depended on the filter, which no
procedural image can show. The norm of any other filter says nothing but how large its output is,
which the costs know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.graph.weights import UnitWeights, as_matrix
from lbyl.planning.criteria import Criterion, first_of_blocks, register
from lbyl.planning.grouped import eliminate_groups, group_views
from lbyl.runtime.recording import repeated
from lbyl.statistics.moments import Statistics
from lbyl.statistics.solve import RIDGE, ridge_inverse
from lbyl.statistics.units import measured_consumers


@dataclass(frozen=True)
class ConsumerView:
    """Second moments of a unit's channels, and of the weights by which consumers multiply them."""

    covariance: Tensor  # (m, m)
    weight: Tensor  # (m, m): VᵀV summed over consumers and taps

    @property
    def total(self) -> Tensor:
        """What consumers make of all channels, as one number."""
        return (self.weight * self.covariance).sum().clamp(min=1e-30)


def consumer_view(weights: UnitWeights, statistics: Statistics) -> ConsumerView | None:
    """Covariance of a unit's channels and the Gram matrix of all that multiplies them."""
    view: ConsumerView | None = None
    for consumer, moments, index in measured_consumers(weights, statistics):
        _, measured = moments.channel_level()
        matrix = moments.arrange(as_matrix(weights.state[consumer.weight], consumer))
        rows = matrix.to(measured)[:, index].transpose(1, 2).flatten(0, 1)  # (outputs · taps, m)
        gram = rows.T @ rows
        if view is None:
            view = ConsumerView(measured[index[:, None], index], gram)
        else:
            view = replace(view, weight=view.weight + gram)
    return view


BLOCK = 64  # removals after which changes are applied at once; no result depends on it
RECORDED = 16  # the same on a device, which repeats a block: the shorter, the sooner recorded
TOGETHER = 1 << 27  # numbers in matrices worked out at once, 1 GiB each; no result depends on it

Order = list[tuple[int, float]]
"""Channels in the order they are pruned, each with what it adds to the error."""


def eliminate(view: ConsumerView, importance: Tensor, ridge: float = RIDGE) -> Order:
    """The order of one unit."""
    return eliminate_together([view], [importance], ridge)[0]


def eliminate_together(
    views: Sequence[ConsumerView], importances: Sequence[Tensor], ridge: float = RIDGE
) -> list[Order]:
    """The orders of several units, one removal of each at a time.

    With H = (C + εI)⁻¹ and M = VᵀV a removal changes both by few ranks:
    H ← H − u uᵀ with u = H_j/√H_jj, and M ← M − s bᵀ − b sᵀ with s = H_j/H_jj and
    b = M_j − s M_jj/2. Changes wait until a block of them is applied in one product; meanwhile
    diagonals are kept up to date and rows are worked out when asked for. Nothing is read back from
    the device before the end. Units with fewer channels than the largest are filled up by channels
    that count as pruned; what is computed of them once they have none left is dropped.
    """
    sizes = [len(importance) for importance in importances]
    elimination = Elimination.of(views, importances, ridge)
    orders: list[Tensor] = []
    costs: list[Tensor] = []
    blocks = -(-(max(sizes) - 1) // len(elimination.order))
    for _ in repeated(elimination.remove_block, blocks, elimination.gram.device):
        orders.append(elimination.order.clone())
        costs.append(elimination.costs.clone())
    if not orders:
        return [[] for _ in views]
    named, told = torch.cat(orders).T.tolist(), torch.cat(costs).T.tolist()
    return [list(zip(j[: n - 1], c[: n - 1])) for n, j, c in zip(sizes, named, told)]


@dataclass
class Elimination:
    """Units in the midst of it; everything is changed in place."""

    inverse: Tensor  # (units, m, m): H as of the last block
    gram: Tensor  # (units, m, m): M as of the last block
    importance: Tensor  # (units, m)
    pruned: Tensor  # (units, m)
    diagonals: Tensor  # (2, units, m): of M and of H, as of now
    order: Tensor  # (removals, units): of this block
    costs: Tensor
    left: int  # removals of the largest unit

    @classmethod
    def of(
        cls, views: Sequence[ConsumerView], importances: Sequence[Tensor], ridge: float
    ) -> Elimination:
        sizes = [len(importance) for importance in importances]
        units, size = len(sizes), max(sizes)
        like = views[0].covariance.double()
        inverse = torch.eye(size, dtype=like.dtype, device=like.device).repeat(units, 1, 1)
        gram, importance = torch.zeros_like(inverse), torch.zeros_like(inverse[:, 0])
        pruned = torch.ones_like(importance, dtype=torch.bool)
        for n in dict.fromkeys(sizes):
            alike = [i for i, m in enumerate(sizes) if m == n]
            at = torch.tensor(alike, device=like.device)
            covariances = torch.stack([views[i].covariance.double() for i in alike])
            inverse[at, :n, :n] = _inverses(covariances, ridge)
            gram[at, :n, :n] = torch.stack([views[i].weight.double() for i in alike])
            importance[at, :n] = torch.stack([importances[i].to(importance) for i in alike])
            pruned[at, :n] = False
        diagonals = torch.stack([m.diagonal(dim1=1, dim2=2) for m in (gram, inverse)])
        block = RECORDED if like.is_cuda else BLOCK
        order = torch.zeros(block, units, dtype=torch.long, device=like.device)
        costs = gram.new_zeros(block, units)
        return cls(inverse, gram, importance, pruned, diagonals, order, costs, size - 1)

    def remove_block(self) -> None:
        """Remove a block of channels of every unit, or those that are left."""
        inverse, gram, diagonals = self.inverse, self.gram, self.diagonals
        units, size = self.importance.shape
        # Of a recording all blocks are alike; the last of its removals may be of nothing.
        block = len(self.order)
        steps = block if gram.is_cuda else min(block, self.left)
        self.left -= steps
        each = torch.arange(units, device=gram.device)
        u = gram.new_zeros(units, steps, size)
        sb = gram.new_zeros(units, steps, 2, size)  # s and b take turns
        for k in range(steps):
            cost = diagonals[0] / diagonals[1].clamp(min=1e-300)
            # A cost that rounding made no number is dear: every channel is named once.
            price = (self.importance * cost).nan_to_num_(nan=1e300, posinf=1e300)
            j = price.masked_fill_(self.pruned, torch.inf).argmin(1)
            at = j[:, None]
            self.order[k], self.costs[k] = j, cost.gather(1, at)[:, 0]
            row, column = inverse[each, j], gram[each, j]
            if k:
                row = row - (u[each, :k, j][:, None] @ u[:, :k])[:, 0]
                other = sb[each, :k, :, j].flip(2).flatten(1)  # s counts as much as b has at j
                column = column - (other[:, None] @ sb[:, :k].flatten(1, 2))[:, 0]
            pivot = row.gather(1, at).clamp_(min=1e-300)
            s, b = sb[:, k].unbind(1)
            torch.div(row, pivot, out=s)
            torch.addcmul(column, s, column.gather(1, at), value=-0.5, out=b)
            torch.mul(s, pivot.sqrt_(), out=u[:, k])
            diagonals[0].addcmul_(s, b, value=-2)
            diagonals[1].addcmul_(u[:, k], u[:, k], value=-1)
            self.pruned.scatter_(1, at, True)
        inverse -= u.mT @ u
        gram -= sb.flatten(1, 2).mT @ sb.flip(2).flatten(1, 2)


def _inverses(covariances: Tensor, ridge: float) -> Tensor:
    """(C + εI)⁻¹ of each, ε relative to the mean variance."""
    epsilon = ridge * covariances.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-280)
    shifted = covariances.clone()
    shifted.diagonal(dim1=1, dim2=2).add_(epsilon[:, None])
    roots, failed = torch.linalg.cholesky_ex(shifted)
    inverses = torch.cholesky_inverse(roots)
    for i in torch.nonzero(failed).reshape(-1).tolist():
        inverses[i] = _indefinite_inverse(covariances[i], ridge)
    return inverses


def _indefinite_inverse(covariance: Tensor, ridge: float) -> Tensor:
    """The same of the positive part where rounding left it indefinite."""
    inverse = ridge_inverse(covariance, ridge)
    if inverse is not None and bool((inverse.diagonal() > 0).all()):
        return inverse
    return torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)


def _groups(units: Sequence[UnitWeights]) -> list[list[UnitWeights]]:
    """Units that are worked out at once.

    On a device a step takes as long for all as for one, so that smaller units join larger ones;
    a processor would only compute more.
    """
    groups: list[list[UnitWeights]] = []
    for unit in sorted(units, key=lambda unit: -unit.unit.channels):
        for group in groups:  # how many are worked out at once; no result depends on it
            size = group[0].unit.channels
            alike = size == unit.unit.channels or unit.device.type != "cpu"
            if alike and group[0].device == unit.device and (len(group) + 1) * size**2 <= TOGETHER:
                group.append(unit)
                break
        else:
            groups.append([unit])
    return groups


def ranking(order: Sequence[int], channels: int) -> Tensor:
    """(channels,): the best first, of an order in which they are pruned; the last is not in it."""
    removed = torch.tensor(order, dtype=torch.long)
    mask = torch.ones(channels, dtype=torch.bool)
    mask[removed] = False
    return torch.cat([removed, torch.nonzero(mask).reshape(-1)]).flip(0)


@register("echo")
@dataclass(frozen=True)
class EchoCriterion(Criterion):
    """Backward elimination on collected statistics; behind BatchNorm the norm of filters, to a
    power, weighs their costs."""

    power: float = 4.0
    needs_statistics: ClassVar[bool] = True

    def select(self, weights: UnitWeights, count: int, statistics: Statistics | None) -> Tensor:
        if statistics is None:
            raise LbylError("criterion 'echo' needs statistics, and none were collected")
        order = [j for j, _ in self.order(weights, statistics)]
        return first_of_blocks(ranking(order, weights.unit.channels), count, weights.unit)

    def order(self, weights: UnitWeights, statistics: Statistics) -> Order:
        """All removals of a unit but the last channel's, with their costs; worked out once."""
        self.prepare([weights], statistics)
        return statistics.orders[self._key(weights)]

    def _key(self, weights: UnitWeights) -> tuple[str, float]:
        return weights.unit.name, self.power

    def prepare(self, units: Sequence[UnitWeights], statistics: Statistics | None) -> None:
        """Work out the orders of several units, those of equal size together."""
        if statistics is None:
            return
        waiting: list[UnitWeights] = []
        for unit in units:
            if unit.unit.kind != "channels" and self._key(unit) not in statistics.orders:
                views = group_views(unit, statistics)
                if views:
                    block = unit.unit.block
                    order = eliminate_groups(views, unit.unit.channels, block=block)
                    statistics.orders[self._key(unit)] = order
            if self._key(unit) not in statistics.orders:
                waiting.append(unit)
        for alike in _groups(waiting):
            self._together(alike, statistics)

    def _together(self, units: Sequence[UnitWeights], statistics: Statistics) -> None:
        measured: list[tuple[UnitWeights, ConsumerView, Tensor]] = []
        for unit in units:
            view = consumer_view(unit, statistics)
            norms = replace(unit).criterion_filters.norm(dim=1)  # a copy: it keeps what it reads
            if view is None:  # nothing measured: only the norm
                ranked = torch.argsort(norms, stable=True)[:-1].tolist()
                statistics.orders[self._key(unit)] = [(j, 0.0) for j in ranked]
            else:
                normalised = all(p.norm is not None for p in unit.unit.producers)
                power = self.power if normalised else 0.0
                importance = (norms / norms.max().clamp(min=1e-30)) ** power
                measured.append((unit, view, importance.to(view.covariance.device)))
                statistics.totals[unit.unit.name] = view.total
        if measured:
            _, views, importances = zip(*measured)
            for (unit, *_), order in zip(measured, eliminate_together(views, importances)):
                statistics.orders[self._key(unit)] = order
