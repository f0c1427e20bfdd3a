"""Units: sets of channels that can be pruned one by one, with everything that is cut with them.

A unit is pure data (names and index tensors, no modules): it prints every consequence of removing a
channel, and it knows several producers, several consumers and channel-wise layers with weights in
between. Channels have one numbering for the whole network; a unit owns the range
`start … start + channels`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lbyl.errors import LbylError

Axis = tuple[str, int]
"""A parameter's name and one of its axes."""


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer: sums over input channels, makes new output channels."""

    name: str  # the weight's module, or the weight itself where it stands alone
    weight: str
    bias: str | None
    input_axis: int
    output_axis: int
    groups: int
    kind: str  # "conv", "transposed" or "linear"
    value_in: int
    value_out: int
    positions: int  # how often the weight is applied per example: MACs = positions × its size
    call: int = field(repr=False)  # identity of the recorded call


@dataclass(frozen=True)
class Norm:
    """A BatchNorm: names of its parameters, and the values it stands between."""

    name: str
    mean: str
    var: str
    weight: str | None
    bias: str | None
    eps: float
    value_in: int
    value_out: int


@dataclass(frozen=True)
class ChannelNorm:
    """A norm over channels (LayerNorm, RMSNorm) that may lose some of them, and who reads it."""

    name: str
    weight: str
    bias: str | None
    centred: bool  # whether it takes the mean of the channels away, too
    consumers: tuple[str, ...]  # layers that read what it gives
    offset: float = 0.0  # the scale is the weight plus this


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
    norm: Norm | None  # the BatchNorm right behind it, which takes the corrections
    kind: str
    channel: Tensor = field(repr=False)  # for every input column its channel, −1 where fixed;
    # (columns, 2) where it belongs to a channel and, besides, to an attention head
    calls: int = 1

    def taps(self, shape: Sequence[int]) -> int:
        """How many positions of a kernel its weight, of this shape, has for every input."""
        return math.prod(shape) // (shape[self.output_axis] * shape[self.axis])

    def flattened_columns(self) -> Tensor | None:
        """(channels, columns each) behind a flatten, where each channel has several columns.

        None where a column belongs to no channel, or channels differ in their number of columns.
        """
        if self.channel.dim() > 1 or bool((self.channel < 0).any()):
            return None
        order = torch.argsort(self.channel, stable=True)
        _, counts = torch.unique(self.channel, return_counts=True)
        if len(counts) == len(self.channel) or bool((counts != counts[0]).any()):
            return None
        return order.reshape(len(counts), -1)


@dataclass(frozen=True)
class AttentionRows:
    """The attention that a unit is part of.

    `query` and `key` are (heads, channels): indices along the output axis of the weights named
    beside them.
    """

    module: str  # that holds the layers
    called_in: tuple[str, ...]  # modules that make the products
    products: tuple[tuple[str, int], ...]  # function and number of its call: queries times keys
    query: Tensor
    key: Tensor
    query_weight: str
    key_weight: str
    plain: bool  # nothing but moving and scaling lies between the layers and the product
    # Of `nn.MultiheadAttention`: heads, channels of queries, of values, and before any were pruned.
    sizes: tuple[int, int, int, int] | None = None


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
    residual: bool = False  # additions tie its channels across layers
    kind: str = "channels"  # or a part of attention: "heads", "qk", "v"
    block: Tensor | None = field(default=None, repr=False)  # (m,): of each block as many are kept
    multiple: int = 1  # as many are kept as a multiple of this, which kernels ask for
    masked: bool = False  # what surrounds its layers keeps its size: pruned rows are zeros there
    attention: AttentionRows | None = field(default=None, repr=False)

    @property
    def blocks(self) -> int:
        """How many blocks its channels form, which stay equal in size."""
        return 1 if self.block is None else int(self.block.max()) + 1

    @property
    def range(self) -> range:
        return range(self.start, self.start + self.channels)

    def owns(self, channel: Tensor) -> Tensor:
        """(n,): whether each index of an axis, given by its channel, belongs to this unit."""
        return self.local(channel) >= 0

    def local(self, channel: Tensor) -> Tensor:
        """(n,): for each index of an axis its channel counted within this unit, −1 for none."""
        inside = (channel >= self.start) & (channel < self.range.stop)
        local = torch.where(inside, channel - self.start, -1)
        return local if channel.dim() == 1 else local.amax(1)

    def positions(self, channel: Tensor) -> Tensor:
        """Indices of an axis that belong to this unit, ordered by channel, then by index."""
        local = self.local(channel)
        owned = torch.nonzero(local >= 0).reshape(-1)
        return owned[torch.argsort(local[owned], stable=True)]

    def slice_counts(self, channel: Tensor) -> Tensor:
        """(m,): how many indices of an axis belong to each of this unit's channels."""
        local = self.local(channel)
        return torch.bincount(local[local >= 0], minlength=self.channels)

    def __str__(self) -> str:
        made = " + ".join(p.name for p in self.producers)
        through = " → ".join(self.path) or "nothing"
        what = f"{self.channels} {'heads' if self.kind == 'heads' else 'channels'}"
        what += f", equally many of {self.blocks} blocks" if self.blocks > 1 else ""
        lines = [f"{self.name}: {what}", f"  made by    {made}"]
        lines += [f"  sliced     {', '.join(self.between)}"] if self.between else []
        read = ", ".join(self.consumers) or "the product of queries and keys"
        lines += [f"  through    {through}", f"  read by    {read}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Output:
    """A tensor that the network gives; its shape is None where values decide on it."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Graph:
    """All units of a network, and for each unprunable layer the reason."""

    units: tuple[Unit, ...]
    consumers: Mapping[str, Consumer]
    axes: Mapping[Axis, Tensor]  # every parameter axis that carries channels: index → channel
    unprunable: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    layers: tuple[Layer, ...] = field(repr=False)
    norms: tuple[Norm, ...] = field(repr=False)
    fixed_macs: int = 0
    batch: int = 1
    all_units: tuple[Unit, ...] = field(default=(), repr=False)  # residual ones too, for budgets
    channel_norms: tuple[ChannelNorm, ...] = field(default=(), repr=False)
    tables: frozenset[str] = field(default=frozenset(), repr=False)  # of embeddings, by column
    normalises: bool = True  # whether anything in the network does
    outputs: tuple[Output, ...] = field(default=(), repr=False)  # on the example inputs
    # Vectors that the example does not reach and that could meet channels: they keep their size.
    unreached: tuple[str, ...] = ()

    @classmethod
    def empty(cls, unprunable: Mapping[str, str]) -> Graph:
        """A graph without units, for a result that was read from a file."""
        return cls((), {}, {}, unprunable, {}, (), ())

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
    def forgot(self) -> bool:
        """Whether nothing tells what channels are like: convolutions, and nothing normalises.

        Most such networks had BatchNorms that were folded into their weights.
        """
        return not self.normalises and any(c.kind == "conv" for c in self.consumers.values())

    @property
    def channels(self) -> int:
        return sum(unit.channels for unit in self.units)

    @cached_property
    def numbers(self) -> int:
        """How many numbers of channels there are, those of dropped units included."""
        every = [torch.full((1,), -1), *(index.reshape(-1) for index in self.axes.values())]
        return int(torch.cat(every).max()) + 1

    @cached_property
    def _owner(self) -> Tensor:
        """For every number of a channel the index of its unit, and −1 as the last."""
        owner = torch.full((max((u.range.stop for u in self.units), default=0) + 1,), -1)
        for i, unit in enumerate(self.units):
            owner[unit.start : unit.range.stop] = i
        return owner

    @cached_property
    def units_of(self) -> Mapping[Axis, tuple[Unit, ...]]:
        """The units whose channels lie along each parameter axis."""
        last = len(self._owner) - 1
        found = {}
        for axis, channel in self.axes.items():
            index = self._owner[channel.reshape(-1).clamp(min=-1, max=last)]
            found[axis] = tuple(self.units[i] for i in torch.unique(index).tolist() if i >= 0)
        return found

    @cached_property
    def axes_of(self) -> Mapping[str, tuple[Axis, ...]]:
        """Unit → the parameter axes that carry any of its channels."""
        found: dict[str, list[Axis]] = {unit.name: [] for unit in self.units}
        for axis, units in self.units_of.items():
            for unit in units:
                found[unit.name].append(axis)
        return {name: tuple(axes) for name, axes in found.items()}

    @cached_property
    def parts(self) -> Mapping[str, Mapping[Axis, Tensor]]:
        """Unit → axis of a parameter → those of the unit's channels of which it needs one at least.

        Behind a concatenation a layer makes or reads only some channels of a unit, and a unit that
        keeps others would leave it none. Named are only axes of which that is true; a layer that
        reads its own unit has one for what it reads and one for what it makes.
        """
        owner = self._owner
        parts: dict[str, dict[Axis, Tensor]] = {}
        whole = {unit.start: np.arange(unit.start, unit.range.stop) for unit in self.units}
        for axis, channel in self.axes.items():
            if channel.dim() > 1:  # beside heads, of which some stay as well as of the channels
                continue
            numbers = channel.numpy()  # the same memory, looked at much faster
            all_of_one = whole.get(int(numbers[0])) if len(numbers) else None
            if all_of_one is not None and np.array_equal(numbers[: len(all_of_one)], all_of_one):
                continue  # the usual case: all channels of a unit, in order
            index = owner[channel.clamp(max=len(owner) - 1)]  # −1: no channel, so always kept
            if bool((index < 0).any()):
                continue
            owned = [(self.units[i], channel[index == i]) for i in torch.unique(index).tolist()]
            found = [(unit, torch.unique(own) - unit.start) for unit, own in owned]
            if any(len(own) == unit.channels for unit, own in found):
                continue
            unit, own = max(found, key=lambda pair: len(pair[1]))
            parts.setdefault(unit.name, {})[axis] = own
        return parts

    def columns(self, unit: Unit, consumer: Consumer) -> Tensor | None:
        """Input columns of a consumer by channel of a unit: (channels read, columns each).

        None where it reads some of them more often than others.
        """
        positions = unit.positions(consumer.channel)
        _, counts = torch.unique(unit.local(consumer.channel)[positions], return_counts=True)
        if bool((counts != counts[:1]).any()):
            return None
        return positions.reshape(len(counts), -1)

    def macs(self, sizes: Mapping[str, int] | None = None) -> int:
        """Multiply–accumulates of one example; `sizes` gives numbers of weights after slicing."""
        total = self.fixed_macs
        for layer in self.layers:
            size = (
                sizes[layer.weight] if sizes else int(torch.Size(self.shapes[layer.weight]).numel())
            )
            total += layer.positions * size
        return total // self.batch

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units, {self.channels} prunable channels", ""]
        lines += [str(unit) for unit in self.units]
        if self.unprunable:
            lines += ["", "unprunable"]
            lines += [f"  {name}: {reason}" for name, reason in self.unprunable.items()]
        if self.unreached:
            lines += ["", f"not reached by the example: {', '.join(self.unreached)}"]
        return "\n".join(lines)
