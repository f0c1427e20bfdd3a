"""Units: sets of channels that can go one by one, with everything that follows when they do.

What the design must satisfy: a unit is pure data (names and index tensors, no modules), it prints
every consequence of removing a channel, and it knows several producers, several consumers and
channel-wise layers with weights in between. Channels have one numbering for the whole network;
a unit owns the range `start … start + channels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lbyl.channels import Axis, Contraction, Norm
from lbyl.exceptions import LbylError


@dataclass(frozen=True)
class Producer:
    """A layer whose filters make the unit's channels."""

    name: str
    weight: str
    axis: int
    bias: str | None
    norm: Norm | None  # the BatchNorm right behind it
    kind: str


@dataclass(frozen=True)
class Consumer:
    """A layer that reads channels; what pruned channels carried is written into its weight."""

    name: str
    weight: str
    bias: str | None
    axis: int  # of the weight, along which inputs lie
    output_axis: int
    norm: Norm | None  # the BatchNorm right behind it, which takes the repairs
    kind: str
    channel: Tensor = field(repr=False)  # for every input column its channel, −1 where fixed
    calls: int = 1


@dataclass(frozen=True)
class Unit:
    """Channels `start … start + channels`, who makes them, passes them on and reads them."""

    name: str
    start: int
    channels: int
    producers: tuple[Producer, ...]
    consumers: tuple[str, ...]
    between: tuple[str, ...]  # channel-wise layers with parameters, sliced along
    path: tuple[str, ...]  # names of the calls between producer and first consumer
    stream: bool = False

    @property
    def range(self) -> range:
        return range(self.start, self.start + self.channels)

    def __str__(self) -> str:
        made = " + ".join(p.name for p in self.producers)
        through = " → ".join(self.path) or "nothing"
        lines = [f"{self.name}: {self.channels} channels", f"  made by    {made}"]
        lines += [f"  sliced     {', '.join(self.between)}"] if self.between else []
        lines += [f"  through    {through}", f"  read by    {', '.join(self.consumers)}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Graph:
    """All units of a network, and for each layer left alone the reason."""

    units: tuple[Unit, ...]
    consumers: Mapping[str, Consumer]
    axes: Mapping[Axis, Tensor]  # every parameter axis that carries channels: index → channel
    left_alone: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    contractions: tuple[Contraction, ...] = field(repr=False)
    norms: tuple[Norm, ...] = field(repr=False)
    grouped_norms: Mapping[str, int] = field(repr=False)
    fixed_macs: int = 0
    batch: int = 1

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, name: str) -> Unit:
        if name not in self._by_name:
            raise LbylError(f"no unit is named {name!r}; the units are {', '.join(self.names)}")
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @property
    def names(self) -> list[str]:
        return [unit.name for unit in self.units]

    @property
    def channels(self) -> int:
        return sum(unit.channels for unit in self.units)

    def columns(self, unit: Unit, consumer: Consumer) -> Tensor:
        """Input columns of a consumer by channel of a unit: (channels read, columns each)."""
        inside = (consumer.channel >= unit.start) & (consumer.channel < unit.range.stop)
        places = torch.nonzero(inside).reshape(-1)
        order = torch.argsort(consumer.channel[places], stable=True)
        present = torch.unique(consumer.channel[places])
        if len(places) % max(1, len(present)):
            raise LbylError(f"{consumer.name} reads the channels of {unit.name} unevenly")
        return places[order].reshape(len(present), -1)

    def macs(self, sizes: Mapping[str, int] | None = None) -> int:
        """Multiply–accumulates of one example; `sizes` gives numbers of weights after slicing."""
        total = self.fixed_macs
        for layer in self.contractions:
            size = (
                sizes[layer.weight] if sizes else int(torch.Size(self.shapes[layer.weight]).numel())
            )
            total += layer.positions * size
        return total // self.batch

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units, {self.channels} prunable channels", ""]
        lines += [str(unit) for unit in self.units]
        if self.left_alone:
            lines += ["", "left alone"]
            lines += [f"  {name}: {reason}" for name, reason in self.left_alone.items()]
        return "\n".join(lines)
