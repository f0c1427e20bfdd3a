"""From a plan to new weights: deliver, rewrite the readers, repair, slice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lbyl.exceptions import LbylError
from lbyl.plan import Plan
from lbyl.repair import output_shift, repaired
from lbyl.restore.base import Delivery, Method, Reading
from lbyl.statistics.base import Statistics
from lbyl.surgery import can_take_bias, cut, sliced, surviving, surviving_indices, take, tensors
from lbyl.unit import Consumer, Graph
from lbyl.weights import UnitWeights, unit_weights

Progress = Callable[[str, int, int], None]
"""Called with the stage's name, steps done and steps in all."""


@dataclass(frozen=True)
class Restoration:
    """The slim model, and the delivery of every unit for those who want to look at it."""

    model: nn.Module
    deliveries: dict[str, Delivery]
    weights: dict[str, UnitWeights]


def as_matrix(weight: Tensor, consumer: Consumer) -> Tensor:
    """A consumer's weight as (outputs, inputs, taps) in float64."""
    moved = weight.detach().double().movedim((consumer.output_axis, consumer.axis), (0, 1))
    return moved.reshape(*moved.shape[:2], -1)


def from_matrix(matrix: Tensor, consumer: Consumer, like: Tensor) -> Tensor:
    """Undo `as_matrix`."""
    full = matrix.reshape(*matrix.shape[:2], *like.shape[2:])
    return full.movedim((0, 1), (consumer.output_axis, consumer.axis))


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
    values |= _merged(graph, kept, deliveries, weights)
    state = tensors(model)
    touched = [c for c in graph.consumers.values() if (c.weight, c.axis) in indices]
    for step, consumer in enumerate(touched):
        if progress:
            progress("solving", step, len(touched))
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
        outputs = indices.get((consumer.weight, consumer.output_axis))
        values |= _outputs_sliced(changed, consumer, outputs)
    _check_finite(values)
    return Restoration(cut(model, graph, values), deliveries, weights)


def _outputs_sliced(
    changed: dict[str, Tensor], consumer: Consumer, outputs: Tensor | None
) -> dict[str, Tensor]:
    """New values of a consumer that loses outputs of its own."""
    if outputs is None:
        return changed
    return {
        name: value.index_select(
            consumer.output_axis if name == consumer.weight else 0, outputs.to(value.device)
        )
        for name, value in changed.items()
    }


def _merged(
    graph: Graph,
    kept: dict[str, Tensor],
    deliveries: dict[str, Delivery],
    weights: dict[str, UnitWeights],
) -> dict[str, Tensor]:
    """Producers and everything channel-wise of units whose kept channels become mixtures."""
    values: dict[str, Tensor] = {}
    for name, delivery in deliveries.items():
        if delivery.merge is None:
            continue
        unit = graph[name]
        readers = {(c.weight, c.axis) for c in weights[name].consumers}
        for (parameter, axis), channel in graph.axes.items():
            inside = (channel >= unit.start) & (channel < unit.range.stop)
            if (parameter, axis) in readers or not bool(inside.any()):
                continue
            old = values.get(parameter, weights[name].state[parameter].detach()).double()
            gain = delivery.gain if _is_scale(parameter, graph) else None
            values[parameter] = _mix(old, axis, channel - unit.start, delivery.merge, gain)
    return values


def _is_scale(parameter: str, graph: Graph) -> bool:
    return any(parameter == norm.weight for norm in graph.norms)


def _mix(tensor: Tensor, axis: int, channel: Tensor, merge: Tensor, gain: Tensor | None) -> Tensor:
    """A parameter whose slices along an axis become mixtures of the unit's channels."""
    if len(channel) != merge.shape[1] or not torch.equal(
        channel.sort().values, torch.arange(len(channel))
    ):
        raise LbylError("merging needs units whose channels are single filters")
    mixed = torch.tensordot(
        merge.to(tensor),
        tensor.index_select(axis, torch.argsort(channel).to(tensor.device)),
        ([1], [axis]),
    )
    if gain is not None:
        mixed = mixed * gain.to(mixed).reshape(-1, *[1] * (mixed.dim() - 1))
    return mixed.movedim(0, axis)


def _check_finite(values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if value.dtype.is_floating_point and not bool(torch.isfinite(value).all()):
            raise LbylError(f"the restored {name} is not finite: leave its layer alone with skip=")


__all__ = ["Progress", "Restoration", "as_matrix", "from_matrix", "restore", "take"]
