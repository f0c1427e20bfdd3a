"""Criteria: which channels of a unit go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.registry import Named, Registry

if TYPE_CHECKING:
    from lbyl.statistics import Statistics
    from lbyl.weights import UnitWeights


class Criterion(Named):
    """Chooses the channels that stay. Most only need to say how much each is worth."""

    needs_statistics: ClassVar[bool] = False

    def score(self, weights: UnitWeights) -> Tensor:
        """(m,): the smallest go first, of equals the later one."""
        raise TypeError(f"criterion {self.name!r} gives no scores")

    def select(self, weights: UnitWeights, count: int, statistics: Statistics | None) -> Tensor:
        """The indices of the `count` channels that stay, ascending."""
        order = torch.argsort(self.score(weights), descending=True, stable=True)
        return order[:count].sort().values.cpu()


criteria: Registry[Criterion] = Registry("criterion")


@criteria.register("l1")
@dataclass(frozen=True)
class L1(Criterion):
    """Sum of absolute weights."""

    def score(self, weights: UnitWeights) -> Tensor:
        return weights.criterion_filters.abs().sum(1)


@criteria.register("l2")
@dataclass(frozen=True)
class L2(Criterion):
    """Euclidean norm."""

    def score(self, weights: UnitWeights) -> Tensor:
        return weights.criterion_filters.norm(dim=1)


@criteria.register("l2-gm")
@dataclass(frozen=True)
class GeometricMedian(Criterion):
    """Sum of distances to all other filters: those near the geometric median are replaceable."""

    def score(self, weights: UnitWeights) -> Tensor:
        filters = weights.criterion_filters
        return torch.cdist(filters, filters, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


@criteria.register("random")
@dataclass(frozen=True)
class Random(Criterion):
    """A seeded draw, different for every unit."""

    seed: int = 0

    def score(self, weights: UnitWeights) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + weights.unit.start)
        return torch.rand(weights.unit.channels, generator=generator)


@criteria.register("random-1")
@dataclass(frozen=True)
class LastDigit(Criterion):
    """The published code's first "random" run: keeps filters whose sum ends in a small digit."""

    def score(self, weights: UnitWeights) -> Tensor:
        sums = weights.filters.float().sum(1).cpu().numpy()
        digits = [next(int(c) for c in reversed(str(s)) if c.isdigit()) for s in sums]
        return -torch.tensor(digits, dtype=torch.float64)


@criteria.register("random-2")
@dataclass(frozen=True)
class KeepLast(Criterion):
    """The published code's second "random" run: keeps the last filters."""

    def score(self, weights: UnitWeights) -> Tensor:
        return torch.arange(weights.unit.channels).double()


@criteria.register("random-3")
@dataclass(frozen=True)
class KeepFirst(Criterion):
    """The published code's third "random" run: keeps the first filters."""

    def score(self, weights: UnitWeights) -> Tensor:
        return -torch.arange(weights.unit.channels).double()
