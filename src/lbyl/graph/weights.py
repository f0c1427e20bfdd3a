"""The weights around a unit: filters, BatchNorm and consumers, by channel and in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Consumer, Graph, Norm, Producer, Unit
from lbyl.runtime.tensors import tensors

State = Mapping[str, Tensor]


def by_channel(tensor: Tensor, axis: int, channel: Tensor, unit: Unit) -> Tensor:
    """Slices of a parameter grouped by channel: (channels, slices each, rest flattened).

    Channels with fewer slices than others are filled with zeros.
    """
    rows = tensor.detach().movedim(axis, 0).reshape(tensor.shape[axis], -1)
    positions = unit.positions(channel)
    owner = unit.local(channel)[positions]
    counts = torch.bincount(owner, minlength=unit.channels)
    if len(positions) and bool((counts == counts[0]).all()):  # the usual case, and it fills nothing
        if not torch.equal(positions, torch.arange(len(rows))):
            rows = rows[positions.to(rows.device)]
        return rows.double().reshape(unit.channels, int(counts[0]), rows.shape[1])
    occurrence = torch.arange(len(positions)) - (counts.cumsum(0) - counts)[owner]
    width = int(counts.max()) if len(positions) else 1
    out = rows.new_zeros(unit.channels, width, rows.shape[1], dtype=torch.float64)
    out[owner.to(out.device), occurrence.to(out.device)] = rows[positions.to(rows.device)].double()
    return out


@dataclass(frozen=True)
class NormWeights:
    """BatchNorm of a producer by channel, the producer's bias folded into the mean."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    eps: float

    @property
    def sigma(self) -> Tensor:
        return (self.var + self.eps).sqrt()

    @property
    def scale(self) -> Tensor:
        """γ/σ: what the normalisation multiplies a filter by."""
        return self.gamma / self.sigma

    @property
    def shift(self) -> Tensor:
        """γμ/σ − β: minus the constant that the normalisation adds."""
        return self.scale * self.mean - self.beta


@dataclass(frozen=True)
class UnitWeights:
    """The weights around one unit."""

    graph: Graph
    unit: Unit
    state: State = field(repr=False)

    @property
    def device(self) -> torch.device:
        return self.state[self.unit.producers[0].weight].device

    def _rows(self, name: str, axis: int) -> Tensor:
        return by_channel(self.state[name], axis, self.graph.axes[name, axis], self.unit)

    @cached_property
    def filters(self) -> Tensor:
        """(m, d): the vectorised filters of all producers, side by side."""
        parts = [self._rows(p.weight, p.axis).flatten(1) for p in self.unit.producers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def bias_of(self, producer: Producer) -> Tensor:
        """(m, r): a producer's bias by channel, zeros where it has none."""
        if producer.bias is not None:
            return self._rows(producer.bias, 0).flatten(1)
        weight = self.state[producer.weight]
        channel = self.graph.axes[producer.weight, producer.axis]
        return by_channel(weight.new_zeros(len(channel)), 0, channel, self.unit).flatten(1)

    @cached_property
    def filters_with_bias(self) -> Tensor:
        """(m, d + 1): filters with the bias appended, as for fully connected layers."""
        return torch.cat([self.filters, *map(self.bias_of, self.unit.producers)], dim=1)

    @cached_property
    def criterion_filters(self) -> Tensor:
        """What criteria judge: a neuron's weight row has its bias with it, a filter has not."""
        linear = all(p.kind == "linear" for p in self.unit.producers)
        return self.filters_with_bias if linear else self.filters

    @cached_property
    def norm(self) -> NormWeights | None:
        """The first producer's BatchNorm, None where any producer lacks one."""
        first = self.unit.producers[0]
        if first.norm is None:
            return None
        return self.norm_weights(first.norm, self.bias_of(first)[:, 0])

    def norm_weights(self, norm: Norm, bias: Tensor) -> NormWeights:
        def read(name: str | None, default: float) -> Tensor:
            if name is None:
                return torch.full((self.unit.channels,), default).to(bias)
            return self._rows(name, 0)[:, 0, 0]

        mean, var = read(norm.mean, 0.0), read(norm.var, 1.0)
        return NormWeights(read(norm.weight, 1.0), read(norm.bias, 0.0), mean - bias, var, norm.eps)

    @cached_property
    def folded(self) -> Tensor:
        """(m, d + 1): filters and constant as the activation sees them, BatchNorm folded in."""
        if self.norm is None:
            return self.filters_with_bias
        scaled = self.filters * self.norm.scale[:, None]
        return torch.cat([scaled, -self.norm.shift[:, None]], dim=1)

    @property
    def consumers(self) -> list[Consumer]:
        return [self.graph.consumers[name] for name in self.unit.consumers]

    @cached_property
    def consumer_weights(self) -> Tensor:
        """(m, d'): the weights by which all consumers multiply each channel, side by side."""
        parts = [self._rows(c.weight, c.axis).flatten(1) for c in self.consumers]
        return torch.cat(parts, dim=1)


def unit_weights(
    graph: Graph,
    model: nn.Module,
    state: State | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, UnitWeights]:
    """The weights around every unit, or some; `state` are the model's tensors where at hand."""
    state = tensors(model) if state is None else state
    chosen = graph.units if names is None else map(graph.__getitem__, names)
    return {unit.name: UnitWeights(graph, unit, state) for unit in chosen}


def as_matrix(weight: Tensor, consumer: Consumer) -> Tensor:
    """A consumer's weight as (outputs, inputs, taps) in float64."""
    moved = weight.detach().double().movedim((consumer.output_axis, consumer.axis), (0, 1))
    return moved.reshape(*moved.shape[:2], -1)


def from_matrix(matrix: Tensor, consumer: Consumer, like: Tensor) -> Tensor:
    """Undo `as_matrix`."""
    full = matrix.reshape(*matrix.shape[:2], *like.shape[2:])
    return full.movedim((0, 1), (consumer.output_axis, consumer.axis))
