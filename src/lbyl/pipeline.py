"""From a plan to new weights: deliver, rewrite the readers, repair, slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lbyl.exceptions import LbylError
from lbyl.plan import Plan
from lbyl.repair import output_shift, repaired
from lbyl.restore.base import Delivery, Method, Reading
from lbyl.statistics.base import Statistics
from lbyl.statistics.gather import Progress
from lbyl.surgery import (
    as_matrix,
    can_take_bias,
    cut,
    from_matrix,
    is_finite,
    readers_cut,
    sliced,
    surviving,
    surviving_indices,
    tensors,
)
from lbyl.unit import Consumer, Graph, Unit
from lbyl.weights import UnitWeights, unit_weights


@dataclass(frozen=True)
class Restoration:
    """The slim model, and the delivery of every unit for those who want to look at it."""

    model: nn.Module
    deliveries: dict[str, Delivery]
    weights: dict[str, UnitWeights]


def restore(
    model: nn.Module,
    graph: Graph,
    plan: Plan,
    method: Method,
    statistics: Statistics | None,
    repair: str,
    progress: Progress | None = None,
) -> Restoration:
    """Cut a copy of `model` as planned and write into its readers what went."""
    weights = unit_weights(graph, model)
    kept = {n: k for n, k in plan.kept.items() if len(k) < plan.channels[n]}
    deliveries = {n: method.deliver(weights[n], k, statistics) for n, k in kept.items()}
    indices = surviving_indices(graph, kept)
    alive = surviving(graph, kept)
    values = sliced(model, indices)
    narrowing = Narrowing(graph, kept, deliveries, alive)
    state = tensors(model)
    values |= _as_held(narrowing.merged(state), state)
    touched = readers_cut(graph, indices)
    for step, consumer in enumerate(touched):
        columns = (consumer.channel < 0) | alive[consumer.channel.clamp(min=0)]
        moments = statistics.get(consumer.name) if statistics else None
        old = as_matrix(state[consumer.weight], consumer)
        reading = Reading(graph, consumer, old, columns, deliveries, kept, moments)
        new = method.rewrite(reading)
        changed = {consumer.weight: from_matrix(new, consumer, state[consumer.weight])}
        if moments is not None:
            shift = output_shift(moments, old, new, columns)
            allowed = can_take_bias(model, consumer.name)
            changed |= repaired(consumer, shift, state, repair, allowed)
        values |= _as_held(narrowing.outputs(changed, consumer), state)
        if progress:
            progress("solving", step + 1, len(touched))
    _check_finite(values)
    return Restoration(cut(model, graph, values), deliveries, weights)


@dataclass(frozen=True)
class Narrowing:
    """What happens along an axis that carries channels: they go, stay, or become mixtures."""

    graph: Graph
    kept: dict[str, Tensor]
    deliveries: dict[str, Delivery]
    alive: Tensor  # for every channel of the network: does it stay?

    def outputs(self, changed: dict[str, Tensor], consumer: Consumer) -> dict[str, Tensor]:
        """New values of a consumer, in full output size, less the outputs it loses itself."""
        channel = self.graph.axes.get((consumer.weight, consumer.output_axis))
        if channel is None:
            return changed
        axes = {name: consumer.output_axis if name == consumer.weight else 0 for name in changed}
        return {n: self.along(value, n, axes[n], channel) for n, value in changed.items()}

    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Producers and everything channel-wise of units whose kept channels become mixtures.

        Input columns of readers stay whole: each reader is rewritten on its own afterwards.
        """
        readers = {(c.weight, c.axis) for c in self.graph.consumers.values()}
        mixing = [unit for unit, _, _ in self._mixing]
        axes = {axis: c for axis, c in self.graph.axes.items() if axis not in readers}
        mixed = {
            name for (name, _), c in axes.items() if any(bool(_inside(c, u).any()) for u in mixing)
        }
        values: dict[str, Tensor] = {}
        for (name, axis), channel in axes.items():
            if name in mixed:
                old = values.get(name, state[name].detach().double())
                values[name] = self.along(old, name, axis, channel)
        return values

    def along(self, tensor: Tensor, name: str, axis: int, channel: Tensor) -> Tensor:
        """A parameter narrowed along one axis, whose indices belong to these channels."""
        stays = (channel < 0) | self.alive[channel.clamp(min=0)]
        new = tensor.index_select(axis, torch.nonzero(stays).reshape(-1).to(tensor.device))
        place = torch.cumsum(stays, 0) - 1  # where an index that stays lies afterwards
        for unit, indices, delivery in self._mixing:
            if delivery.merge is None or not bool(_inside(channel, unit).any()):
                continue
            rows = _rows_of(channel, unit)
            mixed = _mix(tensor, axis, rows, delivery.merge)
            if delivery.gain is not None and name in _scales(self.graph, unit):
                mixed = mixed * delivery.gain.to(mixed).reshape(-1, *[1] * (mixed.dim() - 1))
            into = place[rows[indices].flatten()].to(new.device)
            new = new.index_copy(axis, into, mixed.flatten(0, 1).movedim(0, axis).to(new))
        return new

    @cached_property
    def _mixing(self) -> list[tuple[Unit, Tensor, Delivery]]:
        """Units whose kept channels become mixtures."""
        found = {n: d for n, d in self.deliveries.items() if d.merge is not None}
        return [(self.graph[n], self.kept[n].cpu(), d) for n, d in found.items()]


def _inside(channel: Tensor, unit: Unit) -> Tensor:
    return (channel >= unit.start) & (channel < unit.range.stop)


def _rows_of(channel: Tensor, unit: Unit) -> Tensor:
    """(m, r): the indices along an axis that belong to each channel of a unit."""
    places = torch.nonzero(_inside(channel, unit)).reshape(-1)
    places = places[torch.argsort(channel[places], stable=True)]
    counts = torch.bincount(channel[places] - unit.start, minlength=unit.channels)
    if bool((counts != counts[0]).any()):
        raise LbylError(f"the channels of {unit.name} cannot be merged: they differ in size")
    return places.reshape(unit.channels, -1)


def _scales(graph: Graph, unit: Unit) -> set[str | None]:
    """Scales of the BatchNorms that see the unit's filters first."""
    first = {p.norm.weight for p in unit.producers if p.norm is not None}
    return first or {norm.weight for norm in graph.norms}


def _mix(tensor: Tensor, axis: int, rows: Tensor, merge: Tensor) -> Tensor:
    """Slices along an axis as mixtures of a unit's channels: (kept, slices each, rest)."""
    block = tensor.index_select(axis, rows.flatten().to(tensor.device)).movedim(axis, 0)
    return torch.tensordot(merge.to(tensor), block.unflatten(0, rows.shape), ([1], [0]))


def _as_held(values: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New values as the model will hold them, so that a large one is not kept in float64."""
    return {n: v.to(state[n].dtype) if n in state else v for n, v in values.items()}


def _check_finite(values: dict[str, Tensor]) -> None:
    """Looks at values as the model will hold them: half precision overflows at 65,504."""
    for name, value in values.items():
        if value.dtype.is_floating_point and not is_finite(value):
            raise LbylError(f"the restored {name} is not finite: leave its layer alone with skip=")


__all__ = ["Progress", "Restoration", "restore"]
