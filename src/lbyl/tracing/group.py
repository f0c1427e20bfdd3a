"""From followed channels to units: layers that make the same channels belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lbyl.graph.unit import Axis, ChannelNorm, Consumer, Graph, Layer, Norm, Producer, Unit
from lbyl.torchkit.surroundings import one_thread
from lbyl.tracing.labels import Atoms, Flow, Pinned, connected


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
    """Parameters of three dimensions that are no layer's weight: experts, one beside the other."""
    weights = {layer.weight for layer in flow.layers}
    return [
        name
        for value, name in flow.record.parameters.items()
        if len(flow.shape(value)) == 3 and min(flow.shape(value)) > 1 and name not in weights
    ]


@dataclass(frozen=True)
class Grouping:
    """Channels of a flow by the layers that make them, whether they may go or not."""

    groups: list[tuple[Group, list[str], bool]]  # with who reads them, and whether sums tie them
    unprunable: dict[str, str]  # layer → why, as long as it is in no unit

    @classmethod
    @one_thread()
    def of(cls, flow: Flow) -> Grouping:
        classes = flow.atoms.classes()
        pinned = flow.atoms.pinned(classes)
        full = _full(flow)
        added = torch.zeros(flow.atoms.count, dtype=torch.bool)
        added[classes[flow.atoms.added()]] = True
        unprunable = dict(flow.refused)
        unprunable |= {c.name: _reason(c, flow.atoms, classes, pinned) for c in full}
        unprunable |= dict.fromkeys(_stacked(flow), STACKED)
        groups = _group_producers(full, flow.atoms, classes, pinned)
        read_by = _consumer_names(full, flow.atoms, classes, groups)
        feedback = _feedback(flow, [group.layers for group in groups])
        tied = [fed and bool(added[g.members].any()) for g, fed in zip(groups, feedback)]
        return cls(list(zip(groups, read_by, tied)), unprunable)


def _full(flow: Flow) -> list[Layer]:
    """Layers that read all channels for each that they make."""
    return [c for c in flow.layers if c.weight not in flow.grouped]


@one_thread()
def build(flow: Flow, residual: bool, least: int = 2, known: Grouping | None = None) -> Graph:
    """Group the channels of a flow into units of at least `least` channels each.

    `known` is the grouping of this very flow, where it was worked out before.
    """
    known = Grouping.of(flow) if known is None else known
    unprunable = dict(known.unprunable)
    accepted: list[tuple[Group, list[str], bool]] = []
    for group, consumers, tied in known.groups:
        few = len(group.members) < least
        why = _why_not(group.layers, few, tied and not residual, consumers)
        if why:
            unprunable |= {layer.name: why for layer in group.layers}
            continue
        for layer in group.layers:
            unprunable.pop(layer.name, None)
        accepted.append((group, consumers, tied))
    members = [group.members for group, _, _ in accepted]
    axes, owners = _number(flow, flow.atoms.classes(), members)
    units: list[Unit] = []
    for (group, consumers, tied), touched in zip(accepted, owners):
        start = units[-1].range.stop if units else 0
        units.append(_unit(flow, group, start, consumers, touched, tied))
    return Graph(
        tuple(units),
        _consumers(flow, _full(flow), axes),
        axes,
        unprunable,
        {n: tuple(flow.shape(v)) for v, n in flow.record.parameters.items()},
        tuple(flow.layers),
        tuple(flow.norms),
        flow.fixed_macs,
        channel_norms=_channel_norms(flow, axes),
        tables=frozenset(flow.tables),
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


def _number(
    flow: Flow, classes: Tensor, groups: list[Tensor]
) -> tuple[dict[Axis, Tensor], list[list[str]]]:
    """Number the channels of all groups in turn: every axis by channel, parameters by group."""
    numbering = torch.full((flow.atoms.count,), -1)
    members = torch.cat([torch.empty(0, dtype=torch.long), *groups])
    numbering[members] = torch.arange(len(members))
    sizes = torch.tensor([len(group) for group in groups], dtype=torch.long)
    group_of = torch.repeat_interleave(torch.arange(len(groups)), sizes)
    every = list(flow.atoms.axes)
    lengths = [len(atoms) for atoms in flow.atoms.axes.values()]
    empty = torch.empty(0, dtype=torch.long)
    index = numbering[classes[torch.cat([empty, *flow.atoms.axes.values()])]]  # of all axes
    owner = torch.repeat_interleave(torch.arange(len(every)), torch.tensor(lengths).long())
    marked = index >= 0
    pairs = owner[marked] * len(groups) + group_of[index[marked]]
    axes: dict[Axis, Tensor] = {}
    owners: list[list[str]] = [[] for _ in groups]
    parts = index.split(lengths)
    for pair in torch.unique(torch.unique_consecutive(pairs)).tolist():
        number, group = divmod(pair, len(groups))
        axes[every[number]] = parts[number]
        owners[group].append(every[number][0])
    return axes, owners


@dataclass(frozen=True)
class Group:
    """Layers that make the same channels, and those channels by first use."""

    layers: list[Layer]
    members: Tensor


def _rows(layer: Layer, atoms: Atoms, classes: Tensor) -> Tensor:
    return classes[atoms.axes[layer.weight, layer.output_axis]]


def _group_producers(
    layers: Sequence[Layer], atoms: Atoms, classes: Tensor, pinned: Pinned
) -> list[Group]:
    """Layers that make a common unpinned channel belong together."""
    owner = torch.full((atoms.count,), -1)  # channel → the first layer that makes it
    shared: list[Tensor] = []  # pairs of layers that make a common channel
    first_made: list[Tensor] = []
    for i, layer in enumerate(layers):
        channels = pinned.unpinned(_rows(layer, atoms, classes))
        owners = owner[channels]
        first_made.append(_in_order(channels[owners < 0]))
        owner[first_made[i]] = i
        others = torch.unique(owners[owners >= 0])
        shared.append(torch.stack([torch.full_like(others, i), others]))
    first_layer = connected(len(layers), shared).tolist()
    together: dict[int, tuple[dict[str, Layer], list[Tensor]]] = {}
    for i, layer in enumerate(layers):
        by_weight, parts = together.setdefault(first_layer[i], ({}, []))
        by_weight.setdefault(layer.weight, layer)
        parts.append(first_made[i])
    groups = [Group(list(named.values()), torch.cat(parts)) for named, parts in together.values()]
    return [group for group in groups if len(group.members)]


def _in_order(channels: Tensor) -> Tensor:
    """Each channel once, where it came first."""
    values, index = torch.unique(channels, return_inverse=True)
    if len(values) == len(channels):
        return channels
    first = torch.full_like(values, len(channels))
    first = first.scatter_reduce(0, index, torch.arange(len(channels)), "amin")
    return channels[first.sort().values]


def _consumer_names(
    layers: Sequence[Layer], atoms: Atoms, classes: Tensor, groups: list[Group]
) -> list[list[str]]:
    """For every group the names of the layers that read any of its channels, in order."""
    group_of = torch.full((atoms.count,), -1)
    for i, group in enumerate(groups):
        group_of[group.members] = i
    names_of: list[dict[str, None]] = [{} for _ in groups]
    for layer in layers:
        columns = classes[atoms.axes[layer.weight, layer.input_axis]]
        for i in torch.unique(group_of[columns]).tolist():
            if i >= 0:
                names_of[i][layer.name] = None
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
    return pinned.reason(_rows(layer, atoms, classes)) or "its channels are fixed"


def _unit(
    flow: Flow, group: Group, start: int, consumers: list[str], touched: list[str], residual: bool
) -> Unit:
    layers = group.layers
    producers = tuple(_producer(flow, c) for c in layers)
    named = {p.weight for p in producers} | {p.bias for p in producers}
    named |= {flow.weight_of[name] for name in consumers}
    between = {name.rpartition(".")[0] or name: None for name in touched if name not in named}
    path = _path(flow, layers[0])
    channels = len(group.members)
    return Unit(
        layers[0].name, start, channels, producers, tuple(consumers), tuple(between), path, residual
    )


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
    makers = [call for call in flow.record.calls if value in call.outputs]
    if makers:
        moved = makers[-1].op in ("view", "reshape", "unsqueeze", "__getitem__")
        if not moved or len(makers[-1].inputs) != 1 or len(flow.users.get(value, [])) != 1:
            return None
        value = makers[-1].inputs[0]
    name = flow.record.parameters.get(value)
    alone = len(flow.users.get(value, [])) == 1 and len(flow.shape(value)) == 1
    return name if alone else None


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
