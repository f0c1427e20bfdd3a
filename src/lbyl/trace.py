"""From a recorded run to the graph of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lbyl.channels import Atoms, Axis, Contraction, Flow, Norm
from lbyl.exceptions import LbylError
from lbyl.patterns import matches
from lbyl.record import Inputs, record
from lbyl.rules import propagate
from lbyl.unit import Consumer, Graph, Producer, Unit


def trace(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    streams: bool = False,
    modules: str | Sequence[str] = "*",
    skip: str | Sequence[str] = (),
) -> Graph:
    """Find the channels of `model` that can be pruned, and what each touches.

    `streams` also offers channels that additions tie across layers (residual streams).
    `modules` and `skip` are patterns of layer names to consider and to leave alone.
    """
    from lbyl.proof import prove

    check_model(model)
    flow = propagate(Flow(record(model, example_inputs)))
    graph = build(flow, streams=streams)
    graph = choose(graph, modules, skip)
    graph = replace(graph, batch=_batch(example_inputs))
    return prove(model, example_inputs, graph, flow.record.fake)


def check_model(model: nn.Module) -> None:
    """One clear error for weights no method can work with."""
    if not isinstance(model, nn.Module):
        raise LbylError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise LbylError(f"{name} is uninitialised: run the model once before compressing it")
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise LbylError(
                f"{name} holds NaN or Inf: load weights that are finite before compressing"
            )


def _batch(example_inputs: Inputs) -> int:
    tensors = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor)]
    return max(1, int(tensors[0].shape[0])) if tensors and tensors[0].dim() else 1


def choose(graph: Graph, modules: str | Sequence[str], skip: str | Sequence[str]) -> Graph:
    """The graph with only the units asked for; the others are left alone and say so."""
    dropped = {
        unit.name: "skipped as asked"
        for unit in graph.units
        if not matches(unit.name, modules) or matches(unit.name, skip)
    }
    return without(graph, dropped)


def without(graph: Graph, dropped: dict[str, str]) -> Graph:
    """The graph less the named units, their layers listed as left alone with the reason."""
    if not dropped:
        return graph
    units = tuple(u for u in graph.units if u.name not in dropped)
    alone = dict(graph.left_alone)
    for unit in graph.units:
        if unit.name in dropped:
            alone |= {p.name: dropped[unit.name] for p in unit.producers}
    return replace(graph, units=units, left_alone=alone)


def build(flow: Flow, streams: bool, least: int = 2) -> Graph:
    """Group the channels that a flow found into units of at least so many."""
    classes = flow.atoms.classes()
    pinned = flow.atoms.pinned(classes)
    full = [c for c in flow.contractions if c.weight not in flow.grouped]
    read_by = _readers(full, flow.atoms, classes)
    added = set(classes[flow.atoms.added()].tolist())
    alone = dict(flow.refused)
    alone |= {c.name: _reason(c, flow.atoms, classes, pinned) for c in full}
    chosen: list[tuple[list[Contraction], list[int]]] = []
    groups = [g for g in _group_producers(full, flow.atoms, classes, pinned) if g[1]]
    feedback = _feedback(flow, [layers for layers, _ in groups])
    residual: list[bool] = []
    for (layers, members), fed in zip(groups, feedback):
        readers = _union(read_by, members)
        stream = fed and bool(added & set(members))
        why = _why_not(layers, len(members) < least, stream and not streams, readers)
        if why:
            alone |= {layer.name: why for layer in layers}
            continue
        for layer in layers:
            alone.pop(layer.name, None)
        chosen.append((layers, members))
        residual.append(stream)
    axes, owners = _number(flow, classes, [members for _, members in chosen])
    units: list[Unit] = []
    for i, (layers, members) in enumerate(chosen):
        start = units[-1].range.stop if units else 0
        readers = _union(read_by, members)
        units.append(_unit(flow, layers, start, len(members), readers, owners[i], residual[i]))
    return Graph(
        tuple(units),
        _consumers(flow, full, axes),
        axes,
        alone,
        {n: tuple(flow.shape(v)) for v, n in flow.record.parameters.items()},
        tuple(flow.contractions),
        tuple(flow.norms),
        dict(flow.grouped_norms),
        flow.fixed_macs,
    )


def _feedback(flow: Flow, groups: list[list[Contraction]]) -> list[bool]:
    """For every group of layers: do its channels reach the input of one of its own layers?

    That tells a residual stream, which many blocks read and add to, from branches that only meet
    in one sum.
    """
    group_of = {id(c.call): i for i, layers in enumerate(groups) for c in layers}
    weight_of = {c.weight: i for i, layers in enumerate(groups) for c in layers}
    group_of |= {
        id(c.call): weight_of[c.weight] for c in flow.contractions if c.weight in weight_of
    }
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
    flow: Flow, classes: Tensor, groups: list[list[int]]
) -> tuple[dict[Axis, Tensor], list[list[str]]]:
    """Number the channels of all groups in turn: every axis by channel, parameters by group."""
    numbering = torch.full((flow.atoms.count,), -1)
    members = torch.tensor([c for group in groups for c in group], dtype=torch.long)
    numbering[members] = torch.arange(len(members))
    sizes = torch.tensor([len(group) for group in groups], dtype=torch.long)
    group_of = torch.repeat_interleave(torch.arange(len(groups)), sizes)
    axes: dict[Axis, Tensor] = {}
    owners: list[list[str]] = [[] for _ in groups]
    for axis, atoms in flow.atoms.axes.items():
        index = numbering[classes[atoms]]
        free = index[index >= 0]
        if not len(free):
            continue
        axes[axis] = index
        for group in torch.unique(group_of[free]).tolist():
            owners[group].append(axis[0])
    return axes, owners


def _rows(layer: Contraction, atoms: Atoms, classes: Tensor) -> list[int]:
    found: list[int] = classes[atoms.axes[layer.weight, layer.output_axis]].tolist()
    return found


def _group_producers(
    layers: Sequence[Contraction], atoms: Atoms, classes: Tensor, pinned: dict[int, str]
) -> list[tuple[list[Contraction], list[int]]]:
    """Layers that share a free channel belong together: (layers, channels) by first use."""
    owner: dict[int, int] = {}
    merged = list(range(len(layers)))

    def find(i: int) -> int:
        while merged[i] != i:
            i = merged[i]
        return i

    for i, layer in enumerate(layers):
        for channel in _rows(layer, atoms, classes):
            if channel not in pinned:
                a, b = find(i), find(owner.setdefault(channel, i))
                merged[max(a, b)] = min(a, b)
    together: dict[int, tuple[dict[str, Contraction], dict[int, None]]] = {}
    for i, layer in enumerate(layers):
        found, channels = together.setdefault(find(i), ({}, {}))
        found.setdefault(layer.weight, layer)
        channels |= {c: None for c in _rows(layer, atoms, classes) if c not in pinned}
    return [(list(found.values()), list(channels)) for found, channels in together.values()]


def _readers(
    layers: Sequence[Contraction], atoms: Atoms, classes: Tensor
) -> dict[int, dict[str, None]]:
    """channel → names of the layers that read it, in order."""
    found: dict[int, dict[str, None]] = {}
    for layer in layers:
        columns = torch.unique(classes[atoms.axes[layer.weight, layer.input_axis]])
        for channel in columns.tolist():
            found.setdefault(channel, {})[layer.name] = None
    return found


def _union(read_by: dict[int, dict[str, None]], members: list[int]) -> list[str]:
    """The layers that read any of these channels."""
    names: dict[str, None] = {}
    for member in members:
        names |= read_by.get(member, {})
    return list(names)


def _why_not(
    layers: list[Contraction], too_few: bool, unwanted_stream: bool, readers: list[str]
) -> str | None:
    if unwanted_stream:
        others = ", ".join(layer.name for layer in layers[:4])
        return f"its channels are added to others' (residual stream: {others}); see streams=True"
    if too_few:
        return "its channels can only go all together"
    if not readers:
        return "no layer reads its channels"
    return None


def _reason(layer: Contraction, atoms: Atoms, classes: Tensor, pinned: dict[int, str]) -> str:
    rows = _rows(layer, atoms, classes)
    return next((pinned[c] for c in rows if c in pinned), "its channels are fixed")


def _unit(
    flow: Flow,
    layers: list[Contraction],
    start: int,
    channels: int,
    readers: list[str],
    touched: list[str],
    stream: bool,
) -> Unit:
    producers = tuple(
        Producer(c.name, c.weight, c.output_axis, c.bias, norm_behind(flow, c.value_out), c.kind)
        for c in layers
    )
    named = {p.weight for p in producers} | {p.bias for p in producers}
    named |= {c.weight for c in flow.contractions if c.name in readers}
    between = {name.rpartition(".")[0] or name: None for name in touched if name not in named}
    path = _path(flow, layers[0])
    return Unit(
        layers[0].name, start, channels, producers, tuple(readers), tuple(between), path, stream
    )


def norm_behind(flow: Flow, value: int) -> Norm | None:
    """The BatchNorm that alone reads a value."""
    if len(flow.users.get(value, [])) != 1 or value in flow.record.outputs:
        return None
    return next((n for n in flow.norms if n.value_in == value), None)


def _path(flow: Flow, layer: Contraction) -> tuple[str, ...]:
    """The calls that a layer's output passes on its first way to a layer that reads it."""
    ends = {id(c.call) for c in flow.contractions if c.weight not in flow.grouped}
    names: list[str] = []
    value, place = layer.value_out, -1
    while True:
        later = [(i, call) for i, call in flow.users.get(value, []) if i > place]
        if not later or id(later[0][1]) in ends or not later[0][1].outputs:
            return tuple(names)
        place, call = later[0]
        names.append(call.op.strip("_"))
        value = call.outputs[0]


def _consumers(
    flow: Flow, layers: Sequence[Contraction], axes: dict[Axis, Tensor]
) -> dict[str, Consumer]:
    found: dict[str, Consumer] = {}
    for c in layers:
        channel = axes.get((c.weight, c.input_axis))
        if channel is None:
            continue
        if c.name in found:
            found[c.name] = replace(found[c.name], calls=found[c.name].calls + 1, norm=None)
            continue
        norm = norm_behind(flow, c.value_out)
        found[c.name] = Consumer(
            c.name, c.weight, c.bias, c.input_axis, c.output_axis, norm, c.kind, channel
        )
    return found
