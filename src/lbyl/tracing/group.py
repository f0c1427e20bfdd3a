"""From followed channels to units: layers that make the same channels belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lbyl.graph.unit import (
    Axis,
    ChannelNorm,
    Consumer,
    Graph,
    Layer,
    Norm,
    Output,
    Producer,
    Unit,
)
from lbyl.runtime.session import one_thread
from lbyl.tracing.labels import Atoms, Flow, Pinned, connected, distinct
from lbyl.tracing.record import Record


def without(graph: Graph, dropped: dict[str, str]) -> Graph:
    """The graph less the named units, their layers listed as unprunable with the reason."""
    if not dropped:
        return graph
    units = tuple(u for u in graph.units if u.name not in dropped)
    unprunable = dict(graph.unprunable)
    for unit in graph.units:
        if unit.name in dropped:
            unprunable |= {p.name: dropped[unit.name] for p in unit.producers}
    return replace(graph, units=units, unprunable=unprunable)


STACKED = (
    "its weights are slices of one tensor, a layer each, and which of them run depends on the "
    "input (a mixture of experts of another form than those that can be taken apart); give each "
    "expert layers of its own to prune them"
)


def _stacked(flow: Flow) -> list[str]:
    """Parameters of three dimensions that are no layer's weight: experts, one beside the other.

    Those that a weight is computed from are none.
    """
    weights = {layer.weight for layer in flow.layers}
    normed = {v for call in flow.record.calls if "weight_norm" in call.op for v in call.inputs}
    return [
        name
        for value, name in flow.record.parameters.items()
        if len(flow.shape(value)) == 3 and min(flow.shape(value)) > 1
        if name not in weights and value not in normed
    ]


@dataclass(frozen=True)
class Group:
    """Layers that make the same channels, and those channels by first use."""

    layers: list[Layer]
    members: Tensor
    consumers: list[str]  # layers that read them
    tied: bool  # whether sums tie them
    touched: list[Axis]  # of parameters that carry any of them


@dataclass(frozen=True)
class Grouping:
    """Channels of a flow by the layers that make them, whether they may go or not."""

    flow: Flow
    groups: list[Group]
    unprunable: dict[str, str]  # layer → why, as long as it is in no unit
    numbers: Tensor  # of the channel of each atom: groups in turn, −1 where it is in none

    @classmethod
    @one_thread()
    def of(cls, flow: Flow) -> Grouping:
        classes = flow.atoms.classes()
        pinned = flow.atoms.pinned(classes)
        full = _full(flow)
        added = torch.zeros(flow.atoms.count, dtype=torch.bool)
        added[classes[flow.atoms.added()]] = True
        together = _group_producers(full, flow.atoms, classes, pinned)
        grouped = {layer.name for layers, _ in together for layer in layers}
        unprunable = dict(flow.refused)
        # Layers of a group get a reason when it is refused.
        unprunable |= {
            c.name: "" if c.name in grouped else _reason(c, flow.atoms, classes, pinned)
            for c in full
        }
        unprunable |= dict.fromkeys(_stacked(flow), STACKED)
        group_of = torch.full((flow.atoms.count,), -1)
        numbers = torch.full((flow.atoms.count,), -1)
        start = 0
        for i, (_, members) in enumerate(together):
            group_of[members] = i
            numbers[members] = torch.arange(start, start + len(members))
            start += len(members)
        group_of = group_of[classes]
        read_by = _consumer_names(full, flow.atoms, group_of, len(together))
        touched = _touched(flow.atoms, group_of, len(together))
        feedback = _feedback(flow, [layers for layers, _ in together])
        tied = [fed and bool(added[m].any()) for (_, m), fed in zip(together, feedback)]
        groups = [
            Group(layers, members, names, is_tied, axes)
            for (layers, members), names, is_tied, axes in zip(together, read_by, tied, touched)
        ]
        return cls(flow, groups, unprunable, numbers[classes])

    def accepted(self, residual: bool, least: int = 2) -> tuple[list[Group], dict[str, str]]:
        """Groups of at least `least` channels that may go, and why other layers may not."""
        unprunable = dict(self.unprunable)
        accepted: list[Group] = []
        for group in self.groups:
            few = len(group.members) < least
            why = _why_not(group.layers, few, group.tied and not residual, group.consumers)
            if why:
                unprunable |= {layer.name: why for layer in group.layers}
                continue
            for layer in group.layers:
                unprunable.pop(layer.name, None)
            accepted.append(group)
        return accepted, unprunable

    @one_thread()
    def axes(self, groups: Sequence[Group]) -> dict[Axis, Tensor]:
        """Every parameter axis that carries channels of these groups, which are numbered anew."""
        wanted = {id(group) for group in groups}
        sizes = [(id(group) in wanted, len(group.members)) for group in self.groups]
        anew = torch.full((sum(size for _, size in sizes) + 1,), -1)  # the last: no channel
        old = new = 0
        for is_wanted, size in sizes:
            if is_wanted:
                anew[old : old + size] = torch.arange(new, new + size)
                new += size
            old += size
        touched = {axis for group in groups for axis in group.touched}
        axes = self.flow.atoms.axes
        parts = anew[self.numbers][1:].split([len(atoms) for atoms in axes.values()])
        return {axis: part for axis, part in zip(axes, parts) if axis in touched}

    def units(self, groups: Sequence[Group]) -> tuple[Unit, ...]:
        """A unit for each of these groups, their channels numbered in turn."""
        units: list[Unit] = []
        start = 0
        for group in groups:
            units.append(replace(self._unit(group), start=start))
            start += len(group.members)
        return tuple(units)

    def _unit(self, group: Group) -> Unit:
        """The unit that a group makes, worked out once; its channels are numbered from 0."""
        if id(group) not in self._made:
            self._made[id(group)] = _unit(self.flow, group)
        return self._made[id(group)]

    @cached_property
    def _made(self) -> dict[int, Unit]:
        return {}


def _full(flow: Flow) -> list[Layer]:
    """Layers that read all channels for each that they make."""
    return [c for c in flow.layers if c.weight not in flow.grouped]


def build(known: Grouping, residual: bool, least: int = 2) -> Graph:
    """The graph of all groups of at least `least` channels, residual ones if they are wanted."""
    flow = known.flow
    groups, unprunable = known.accepted(residual, least)
    axes = known.axes(groups)
    return Graph(
        known.units(groups),
        _consumers(flow, _full(flow), axes),
        axes,
        unprunable,
        {n: tuple(flow.record.forms[v].shape) for v, n in flow.record.parameters.items()},
        tuple(flow.layers),
        tuple(flow.norms),
        flow.fixed_macs,
        channel_norms=_channel_norms(flow, axes),
        tables=frozenset(flow.tables),
        normalises=any(call.op.strip("_") in NORMALISING for call in flow.record.calls),
        outputs=_outputs(flow.record),
        unreached=tuple(flow.unreached),
    )


def _outputs(record: Record) -> tuple[Output, ...]:
    known = not record.goes_by_values
    return tuple(
        Output(tuple(record.shapes[v]) if known else None, record.forms[v].dtype)
        for v in record.outputs
    )


# Functions of norms, and those by which norms are written out in arithmetic.
NORMALISING = frozenset(
    """batch_norm instance_norm group_norm layer_norm rms_norm local_response_norm normalize
    rsqrt sqrt var std var_mean std_mean""".split()
)


PASSING = """to type_as float half bfloat16 contiguous clone detach dropout view reshape flatten
unsqueeze squeeze transpose permute expand __getitem__""".split()


def _channel_norms(flow: Flow, axes: dict[Axis, Tensor]) -> tuple[ChannelNorm, ...]:
    """Norms over channels that may go, and the layers that read nothing but what they give."""
    reading: dict[int, list[str]] = {}
    for layer in flow.layers:
        reading.setdefault(layer.call, []).append(layer.name)
    found: dict[str, ChannelNorm] = {}
    for weight, bias, centred, value, offset in flow.channel_norms:
        if (weight, 0) not in axes:
            continue
        names: list[str] = []
        values = [value]
        for passed in values:  # which grows meanwhile
            for _, call in flow.users.get(passed, []):
                names += reading.get(id(call), [])
                further = call.outputs[:1] if call.op in PASSING else []
                values += [v for v in further if v not in values]
        known = found[weight].consumers if weight in found else ()
        readers = tuple(dict.fromkeys([*known, *names]))
        name = weight.rpartition(".")[0]
        found[weight] = ChannelNorm(name, weight, bias, centred, readers, offset)
    return tuple(found.values())


def _feedback(flow: Flow, groups: list[list[Layer]]) -> list[bool]:
    """For every group of layers: do its channels reach the input of one of its own layers?

    If so it is a residual connection, which many blocks read and add to; branches that only meet in
    one sum are not.
    """
    group_of = {c.call: i for i, layers in enumerate(groups) for c in layers}
    weight_of = {c.weight: i for i, layers in enumerate(groups) for c in layers}
    group_of |= {c.call: weight_of[c.weight] for c in flow.layers if c.weight in weight_of}
    behind: dict[int, int] = {}  # value → the groups it depends on, a bit each
    fed = [False] * len(groups)
    for call in flow.record.calls:
        bits = 0
        for value in call.inputs:
            bits |= behind.get(value, 0)
        group = group_of.get(id(call))
        if group is not None:
            fed[group] |= bool(bits >> group & 1)
            bits |= 1 << group
        behind |= dict.fromkeys(call.outputs, bits)
    return fed


def _touched(atoms: Atoms, group_of: Tensor, groups: int) -> list[list[Axis]]:
    """For every group the axes of parameters that carry any of its channels."""
    axes = list(atoms.axes)
    lengths = torch.tensor([len(x) for x in atoms.axes.values()], dtype=torch.long)
    owner = torch.repeat_interleave(torch.arange(len(axes)), lengths)  # atoms lie axis by axis
    touched: list[list[Axis]] = [[] for _ in range(groups)]
    for axis, group in _pairs(owner, group_of[1:], groups):
        touched[group].append(axes[axis])
    return touched


def _pairs(owner: Tensor, group: Tensor, groups: int) -> list[tuple[int, int]]:
    """Each pair of an owner and a group (−1: none) that meet, once, ascending."""
    codes = distinct(owner * (groups + 1) + group + 1).tolist()
    pairs = [divmod(code, groups + 1) for code in codes]
    return [(owner, group - 1) for owner, group in pairs if group]


def _group_producers(
    layers: Sequence[Layer], atoms: Atoms, classes: Tensor, pinned: Pinned
) -> list[tuple[list[Layer], Tensor]]:
    """Layers that make a common unpinned channel belong together."""
    channels, maker = _along(layers, [(c.weight, c.output_axis) for c in layers], atoms, classes)
    free = pinned.first[channels] < 0
    channels, maker = channels[free], maker[free]
    places = torch.arange(len(channels))
    first = torch.full((atoms.count,), len(channels))
    first = first.scatter_reduce(0, channels, places, "amin")[channels]  # where it is first made
    shared = torch.stack([maker, maker[first]])[:, maker != maker[first]]
    first_layer = connected(len(layers), [shared])
    together: dict[int, dict[str, Layer]] = {}
    for root, layer in zip(first_layer.tolist(), layers):
        together.setdefault(root, {}).setdefault(layer.weight, layer)
    new = first == places
    channels, root_of = channels[new], first_layer[maker[new]]
    order = torch.argsort(root_of, stable=True)
    roots, counts = torch.unique_consecutive(root_of[order], return_counts=True)
    members = channels[order].split(counts.tolist())
    return [(list(together[r].values()), m) for r, m in zip(roots.tolist(), members)]


def _along(
    layers: Sequence[Layer], axes: Sequence[Axis], atoms: Atoms, of_atom: Tensor
) -> tuple[Tensor, Tensor]:
    """What belongs to the atoms of an axis of each layer, one after the other; and whose it is."""
    parts = [atoms.axes[axis] for axis in axes]
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.long)
    whole = torch.cat([torch.empty(0, dtype=torch.long), *parts])
    return of_atom[whole], torch.repeat_interleave(torch.arange(len(layers)), lengths)


def _consumer_names(
    layers: Sequence[Layer], atoms: Atoms, group_of: Tensor, groups: int
) -> list[list[str]]:
    """For every group the names of the layers that read any of its channels, in order."""
    read, reader = _along(layers, [(c.weight, c.input_axis) for c in layers], atoms, group_of)
    names_of: list[dict[str, None]] = [{} for _ in range(groups)]
    for layer, group in _pairs(reader, read, groups):
        names_of[group][layers[layer].name] = None
    return [list(names) for names in names_of]


def _why_not(
    layers: list[Layer], too_few: bool, unwanted_residual: bool, consumers: list[str]
) -> str | None:
    if unwanted_residual:
        others = ", ".join(layer.name for layer in layers[:4])
        return f"its channels are added to others' (residual: {others}); see residual=True"
    if too_few:
        return "its channels can only go all together"
    if not consumers:
        return "no layer reads its channels"
    return None


def _reason(layer: Layer, atoms: Atoms, classes: Tensor, pinned: Pinned) -> str:
    rows = classes[atoms.axes[layer.weight, layer.output_axis]]
    return pinned.reason(rows) or "its channels are fixed"


def _unit(flow: Flow, group: Group) -> Unit:
    layers, consumers = group.layers, tuple(group.consumers)
    producers = tuple(_producer(flow, c) for c in layers)
    named = {p.weight for p in producers} | {p.bias for p in producers}
    named |= {flow.weight_of[name] for name in consumers}
    others = [name for name, _ in group.touched if name not in named]
    between = dict.fromkeys(name.rpartition(".")[0] or name for name in others)
    path, channels = _path(flow, layers[0]), len(group.members)
    return Unit(layers[0].name, 0, channels, producers, consumers, tuple(between), path, group.tied)


def _producer(flow: Flow, layer: Layer) -> Producer:
    bias, out = bias_behind(flow, layer)
    norm = norm_behind(flow, out)
    return Producer(layer.name, layer.weight, layer.output_axis, bias, norm, layer.kind)


def bias_behind(flow: Flow, layer: Layer) -> tuple[str | None, int]:
    """The bias of a layer and the value behind it, also where it is added apart from the product.

    `x @ w + b` and `F.conv2d(x, w) + b.view(1, -1, 1, 1)` have the bias b, if nothing else uses it.
    """
    readers = flow.users.get(layer.value_out, [])
    if layer.bias is not None or len(readers) != 1 or layer.value_out in flow.record.outputs:
        return layer.bias, layer.value_out
    call = readers[0][1]
    others = [v for v in call.inputs if v != layer.value_out]
    added = call.op.strip("_") in ("add", "iadd", "radd") and call.kwargs.get("alpha", 1) == 1
    if not added or len(others) != 1:
        return None, layer.value_out
    name = _lone_vector(flow, others[0])
    # Counted from the end, where channels lie in the output and in what is added to it.
    dim = -1 if layer.kind == "linear" else 1 - len(flow.shape_of(layer.weight))
    shape = flow.shape(others[0])
    channels = flow.shape(layer.value_out)[dim]
    if name is None or len(shape) < -dim or shape[dim] != channels or shape.numel() != channels:
        return None, layer.value_out
    return name, call.outputs[0]


def _lone_vector(flow: Flow, value: int) -> str | None:
    """The parameter that a value is, or is a view of, where nothing else uses it."""
    maker = flow.maker.get(value)
    if maker is not None:
        moved = maker.op in ("view", "reshape", "unsqueeze", "__getitem__")
        if not moved or len(maker.inputs) != 1 or len(flow.users.get(value, [])) != 1:
            return None
        value = maker.inputs[0]
    name = flow.record.parameters.get(value)
    alone = len(flow.users.get(value, [])) == 1 and len(flow.shape(value)) == 1
    real = flow.record.forms[value].dtype.is_floating_point
    return name if alone and real else None


def norm_behind(flow: Flow, value: int) -> Norm | None:
    """The BatchNorm that reads a value, None where anything else reads it too."""
    if len(flow.users.get(value, [])) != 1 or value in flow.record.outputs:
        return None
    return flow.norm_at.get(value)


def _path(flow: Flow, layer: Layer) -> tuple[str, ...]:
    """The calls that a layer's output passes on its first way to a layer that reads it."""
    names: list[str] = []
    value, index = layer.value_out, -1
    while True:
        later = [(i, call) for i, call in flow.users.get(value, []) if i > index]
        if not later or id(later[0][1]) in flow.ends or not later[0][1].outputs:
            return tuple(names)
        index, call = later[0]
        names.append(call.op.strip("_"))
        value = call.outputs[0]


def _consumers(
    flow: Flow, layers: Sequence[Layer], axes: dict[Axis, Tensor]
) -> dict[str, Consumer]:
    by_name: dict[str, Consumer] = {}
    for c in layers:
        channel = axes.get((c.weight, c.input_axis))
        if channel is None:
            continue
        if c.name in by_name:
            before = by_name[c.name]
            by_name[c.name] = replace(before, calls=before.calls + 1, norm=None)
            continue
        bias, out = bias_behind(flow, c)
        by_name[c.name] = Consumer(
            c.name,
            c.weight,
            bias,
            c.input_axis,
            c.output_axis,
            norm_behind(flow, out),
            c.kind,
            channel,
        )
    return by_name
