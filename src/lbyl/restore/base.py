"""What every method of restoration has in common.

A method says how a unit's pruned channels are delivered to the kept ones. Most do so with one
delivery matrix per unit; methods that know statistics may rewrite a whole consumer at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.registry import Named, Registry
from lbyl.unit import Consumer, Graph

if TYPE_CHECKING:
    from lbyl.statistics import Moments, Statistics
    from lbyl.weights import UnitWeights


@dataclass(frozen=True)
class Delivery:
    """How a unit's channels are carried by the kept ones.

    `matrix` is S (m × t): channel i ≈ Σ_k S[i, k] · kept channel k. A method that also changes the
    kept channels gives `merge` (t × m), by which filters and normalisation become mixtures, and
    `gain` (t,), a factor on the normalisation's scale.
    """

    matrix: Tensor
    merge: Tensor | None = None
    gain: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """A consumer about to be rewritten: its weight as (outputs, inputs, taps) in float64."""

    graph: Graph
    consumer: Consumer
    weight: Tensor
    alive: Tensor  # (inputs,): which columns stay
    deliveries: dict[str, Delivery]
    kept: dict[str, Tensor]
    moments: Moments | None


class Method(Named):
    """A way to give back what pruned channels carried."""

    needs_statistics: ClassVar[bool] = False
    chooses: ClassVar[bool] = False  # the method picks the kept channels itself
    default_repair: ClassVar[str] = "none"
    statistics_source: ClassVar[str] = "images"  # or "analytic": weights alone

    @property
    def analytic(self) -> bool:
        """Whether the method's statistics follow from the weights alone."""
        return self.statistics_source == "analytic"

    def select(self, weights: UnitWeights, count: int) -> Tensor:
        """The channels that stay, for methods that choose them."""
        raise TypeError(f"method {self.name!r} does not choose channels")

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        raise TypeError(f"method {self.name!r} has no delivery matrix")

    def rewrite(self, reading: Reading) -> Tensor:
        """The consumer's weight for the kept columns: V' = V ×₂ Sᵀ, unit by unit."""
        weight, consumer, graph = reading.weight, reading.consumer, reading.graph
        new = weight.clone()
        for name, delivery in reading.deliveries.items():
            unit = graph[name]
            if name not in reading.kept or consumer.name not in unit.consumers:
                continue
            columns = graph.columns(unit, consumer).to(weight.device)
            present = _present(consumer, unit.start, unit.channels)
            kept = torch.isin(present, reading.kept[name])
            matrix = delivery.matrix.to(weight)[present.to(weight.device)]
            matrix = matrix[:, torch.isin(reading.kept[name], present).to(weight.device)]
            block = weight[:, columns.flatten()].unflatten(1, columns.shape)  # (o, m, r, taps)
            written = torch.einsum("omrk,mt->otrk", block, matrix)
            new[:, columns[kept.to(weight.device)].flatten()] = written.flatten(1, 2)
        return new[:, reading.alive.to(weight.device)]


def _present(consumer: Consumer, start: int, channels: int) -> Tensor:
    """Which of a unit's channels a consumer reads, by their place in the unit."""
    inside = (consumer.channel >= start) & (consumer.channel < start + channels)
    return torch.unique(consumer.channel[inside]) - start


methods: Registry[Method] = Registry("method")


def identity_rows(channels: int, kept: Tensor, like: Tensor) -> Tensor:
    """A delivery matrix that delivers nothing yet: kept channels are themselves."""
    matrix = like.new_zeros(channels, len(kept), dtype=torch.float64)
    matrix[kept.to(like.device), torch.arange(len(kept), device=like.device)] = 1
    return matrix


def pruned_of(channels: int, kept: Tensor) -> Tensor:
    """The channels that go, ascending."""
    mask = torch.ones(channels, dtype=torch.bool)
    mask[kept] = False
    return torch.nonzero(mask).reshape(-1)
