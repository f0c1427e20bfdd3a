"""Criteria: which channels of a unit are pruned."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.runtime.registry import Named, Registry

if TYPE_CHECKING:
    from lbyl.graph.unit import Unit
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Statistics


class Criterion(Named):
    """Chooses the kept channels. Most only define `score`, how much each channel is worth."""

    needs_statistics: ClassVar[bool] = False

    def score(self, weights: UnitWeights) -> Tensor:
        """(m,): the smallest are pruned first, of equals the later one."""
        raise TypeError(f"criterion {self.name!r} gives no scores")

    def prepare(self, units: Sequence[UnitWeights], statistics: Statistics | None) -> None:
        """Called with all units that will be asked for: what is cheaper done for all at once."""

    def select(self, weights: UnitWeights, count: int, statistics: Statistics | None) -> Tensor:
        """The indices of the `count` kept channels, ascending."""
        order = torch.argsort(self.score(weights), descending=True, stable=True).cpu()
        return first_of_blocks(order, count, weights.unit)


def first_of_blocks(order: Tensor, count: int, unit: Unit) -> Tensor:
    """The first `count` channels of an order, ascending; of each block equally many."""
    if unit.block is None:
        return order[:count].sort().values
    blocks = unit.block[order]
    each = count // unit.blocks
    kept = [order[blocks == b][:each] for b in range(unit.blocks)]
    return torch.cat(kept).sort().values


registry: Registry[Criterion] = Registry("criterion")
register = registry.register
names = registry.names
resolve = registry.resolve


def check(criterion: str | Criterion) -> None:
    """Run the checks that every criterion has to pass; the first that fails is an `LbylError`."""
    importlib.import_module("lbyl.checks").check_criterion(criterion)


@register("l1")
@dataclass(frozen=True)
class L1(Criterion):
    """Sum of absolute weights."""

    def score(self, weights: UnitWeights) -> Tensor:
        return weights.criterion_filters.abs().sum(1)


@register("l2")
@dataclass(frozen=True)
class L2(Criterion):
    """Euclidean norm."""

    def score(self, weights: UnitWeights) -> Tensor:
        return weights.criterion_filters.norm(dim=1)


@register("l2-gm")
@dataclass(frozen=True)
class GeometricMedian(Criterion):
    """Sum of distances to all other filters: those near the geometric median are replaceable."""

    def score(self, weights: UnitWeights) -> Tensor:
        filters = weights.criterion_filters
        return torch.cdist(filters, filters, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


@register("random")
@dataclass(frozen=True)
class Random(Criterion):
    """A seeded draw, different for every unit."""

    seed: int = 0

    def score(self, weights: UnitWeights) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + weights.unit.start)
        return torch.rand(weights.unit.channels, generator=generator)


@register("random-1")
@dataclass(frozen=True)
class LastDigit(Criterion):
    """The published code's first "random" run: keeps filters whose sum ends in a small digit."""

    def score(self, weights: UnitWeights) -> Tensor:
        sums = weights.filters.float().sum(1).cpu().numpy()
        digits = [next(int(c) for c in reversed(str(s)) if c.isdigit()) for s in sums]
        return -torch.tensor(digits, dtype=torch.float64)


@register("random-2")
@dataclass(frozen=True)
class KeepLast(Criterion):
    """The published code's second "random" run: keeps the last filters."""

    def score(self, weights: UnitWeights) -> Tensor:
        return torch.arange(weights.unit.channels).double()


@register("random-3")
@dataclass(frozen=True)
class KeepFirst(Criterion):
    """The published code's third "random" run: keeps the first filters."""

    def score(self, weights: UnitWeights) -> Tensor:
        return -torch.arange(weights.unit.channels).double()
