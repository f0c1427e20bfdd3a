"""What every method of restoration has in common.

A method says how a unit's pruned channels are delivered to the kept ones. Most do so with one
delivery matrix per unit; methods that know statistics may rewrite a whole consumer at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.graph.unit import Consumer, Graph, Unit
from lbyl.runtime.notes import note
from lbyl.runtime.registry import Named, Registry

if TYPE_CHECKING:
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Moments, Statistics
    from lbyl.statistics.solve import Regressed, Regression


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


class Found(NamedTuple):
    """What a method knows of a new weight, of which every tap of every input is a column."""

    weight: Tensor  # as it is returned
    flat: Tensor  # (outputs, kept rows): the same, arranged
    rows: Tensor  # of the covariance, that are kept
    mixed: Tensor  # (outputs, kept rows): it, times the covariance
    across: Tensor  # (outputs, kept rows): the old weight, times the covariance


@dataclass(frozen=True)
class Rewrite:
    """A consumer about to be rewritten: its weight as (outputs, inputs, taps) in float64."""

    graph: Graph
    consumer: Consumer
    weight: Tensor
    kept_columns: Tensor  # (inputs,): which columns are kept
    deliveries: dict[str, Delivery]
    kept: dict[str, Tensor]
    moments: Moments | None
    mixed: Tensor | None = None  # (outputs, rows): weight, arranged, times covariance
    # A method may leave the new weight here, and what it came to know of it.
    found: list[Found] = field(default_factory=list)
    takes_mean: bool = True  # whether there is a place for the mean of what went: a bias, a norm


CORRECTIONS = ("none", "mean", "mean+variance", "recalibrate")
"""What is put back at a consumer's output; each includes the one before it."""


@dataclass(frozen=True, kw_only=True)
class Method(Named):
    """A way to give back what pruned channels carried.

    `correction` says what is put back behind every rewritten consumer: the mean of its output, the
    variance too, or both followed by a second run of both networks ("recalibrate").
    """

    correction: str = "none"

    needs_statistics: ClassVar[bool] = False
    chooses: ClassVar[bool] = False  # the method picks the kept channels itself
    source: ClassVar[str] = "procedural"  # of its statistics, or "analytic": weights alone
    by_unit: ClassVar[bool] = True  # one delivery matrix a unit is what is written
    restores_products: ClassVar[bool] = False  # of queries and keys, fitted on their moments
    in_threads: ClassVar[bool] = False  # units may be delivered at the same time
    restores_duplicates: ClassVar[bool] = False  # a pruned channel equal to a kept one, exactly

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise LbylError(
                f"unknown correction {self.correction!r}; the known ones are "
                f"{', '.join(CORRECTIONS)}"
            )

    @property
    def tries(self) -> bool:
        """Whether open choices are made by running trials: not where nothing is run otherwise."""
        return not self.by_unit and self.source != "analytic"

    @property
    def corrects(self) -> bool:
        """Whether anything is put back behind consumers, which takes statistics."""
        return self.correction != "none"

    def select(self, weights: UnitWeights, count: int) -> Tensor:
        """The kept channels, for methods that choose them."""
        raise TypeError(f"method {self.name!r} does not choose channels")

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        raise TypeError(f"method {self.name!r} has no delivery matrix")

    def alike(self, weights: UnitWeights, kept: Tensor) -> Hashable:
        """Units for which this is equal may be delivered in one go."""
        return weights.unit.name

    def deliver_alike(
        self, units: Sequence[tuple[UnitWeights, Tensor]], statistics: Statistics | None
    ) -> list[Delivery]:
        """The same of several units that are `alike`."""
        return [self.deliver(weights, kept, statistics) for weights, kept in units]

    def rewrite(self, rewrite: Rewrite) -> Tensor:
        """The consumer's weight for the kept columns: V' = V ×₂ Sᵀ, unit by unit."""
        weight, consumer, graph = rewrite.weight, rewrite.consumer, rewrite.graph
        new = weight.clone()
        for name, delivery in rewrite.deliveries.items():
            unit = graph[name]
            if name not in rewrite.kept or consumer.name not in unit.consumers:
                continue
            columns = graph.columns(unit, consumer)
            if columns is None:  # which column of a kept one would stand for which is not known
                note(f"the channels of {name} are only cut: it reads some more often than others")
                continue
            columns = columns.to(weight.device)
            present = _present(consumer, unit)
            kept = torch.isin(present, rewrite.kept[name])
            matrix = delivery.matrix.to(weight)[present.to(weight.device)]
            matrix = matrix[:, torch.isin(rewrite.kept[name], present).to(weight.device)]
            block = weight[:, columns.flatten()].unflatten(1, columns.shape)  # (o, m, r, taps)
            written = torch.einsum("omrk,mt->otrk", block, matrix)
            new[:, columns[kept.to(weight.device)].flatten()] = written.flatten(1, 2)
        return new[:, rewrite.kept_columns.to(weight.device)]

    def rewrite_alike(self, regressions: Sequence[Regression]) -> Regressed | None:
        """The weights of consumers of one shape, in one go; None: they are rewritten singly."""
        return None


def _present(consumer: Consumer, unit: Unit) -> Tensor:
    """Which of a unit's channels a consumer reads, by their index in the unit, ascending."""
    local = unit.local(consumer.channel)
    return torch.unique(local[local >= 0])


RIVALS = {
    "coreset": "lbyl.rivals.coreset",
    "fold": "lbyl.rivals.fold",
    "moments": "lbyl.rivals.moments",
    "neuron-merging": "lbyl.rivals.neuron_merging",
    "one-to-one": "lbyl.rivals.one_to_one",
}
"""Methods of others, by name: each is imported when it is asked for."""

registry: Registry[Method] = Registry("method", RIVALS)


def identity_rows(channels: int, kept: Tensor, like: Tensor) -> Tensor:
    """A delivery matrix that delivers nothing yet: kept channels are themselves."""
    matrix = like.new_zeros(channels, len(kept), dtype=torch.float64)
    matrix[kept.to(like.device), torch.arange(len(kept), device=like.device)] = 1
    return matrix
