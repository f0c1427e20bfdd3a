"""From a recorded run to the graph of units."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lbyl.channels import Atoms, Axis, Contraction, Flow, Norm, Pinned
from lbyl.exceptions import LbylError
from lbyl.patterns import matches
from lbyl.record import DoesNotRun, Inputs, one_thread, record
from lbyl.rules import propagate
from lbyl.surgery import is_finite, weightless_copy
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
    flow = follow(model, example_inputs)
    graph = build(flow, streams=streams)
    graph = choose(graph, modules, skip)
    graph = replace(graph, batch=_batch(example_inputs))
    return prove(model, example_inputs, graph, flow.record.fake)


def follow(
    model: nn.Module,
    inputs: Inputs,
    fake: bool | None = None,
    spare: bool = False,
    grouped: Collection[str] = (),
) -> Flow:
    """Record a run and follow its channels; layers that only training runs are heeded too."""
    flow = propagate(Flow(record(model, inputs, fake, spare), grouped=set(grouped)))
    silent = {name for name, _ in model.named_parameters()} - set(flow.record.parameters.values())
    if silent and flow.record.fake:
        _heed_training(flow, model, inputs, silent)
    return flow


def _heed_training(flow: Flow, model: nn.Module, inputs: Inputs, silent: set[str]) -> None:
    """Leave alone what a layer reads that runs in training only, such as an auxiliary head.

    Its parameters took no part in evaluation, so a cut would leave them at the old size.
    """
    try:
        run = record(weightless_copy(model, {}), inputs, fake=True, spare=True, training=True)
    except DoesNotRun as error:  # training asks for more than these inputs: heeded up to there
        run = error.record
    aside = propagate(Flow(run, flow.atoms, grouped=flow.grouped))
    names = [run.parameters.get(value) for value in run.failed]
    aside.pin_all(run.failed if silent & set(names) else [], "it is read in training only")
    for layer in aside.contractions:
        if layer.weight in silent:
            flow.refused[layer.name] = "it runs in training only"
            axis = flow.atoms.axes.get((layer.weight, layer.input_axis))
            if axis is not None:
                flow.atoms.pin(axis, f"it is read by {layer.name}, which runs in training only")


def check_model(model: nn.Module) -> None:
    """One clear error for weights no method can work with."""
    if not isinstance(model, nn.Module):
        raise LbylError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise LbylError(f"{name} is uninitialised: run the model once before compressing it")
        if tensor.dtype.is_floating_point and not is_finite(tensor):
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


@one_thread()
def build(flow: Flow, streams: bool, least: int = 2) -> Graph:
    """Group the channels that a flow found into units of at least so many."""
    classes = flow.atoms.classes()
    pinned = flow.atoms.pinned(classes)
    full = [c for c in flow.contractions if c.weight not in flow.grouped]
    added = torch.zeros(flow.atoms.count, dtype=torch.bool)
    added[classes[flow.atoms.added()]] = True
    alone = dict(flow.refused)
    alone |= {c.name: _reason(c, flow.atoms, classes, pinned) for c in full}
    groups = _group_producers(full, flow.atoms, classes, pinned)
    read_by = _readers(full, flow.atoms, classes, groups)
    feedback = _feedback(flow, [group.layers for group in groups])
    chosen: list[tuple[Group, list[str], bool]] = []
    for group, readers, fed in zip(groups, read_by, feedback):
        stream = fed and bool(added[group.members].any())
        few = len(group.members) < least
        why = _why_not(group.layers, few, stream and not streams, readers)
        if why:
            alone |= {layer.name: why for layer in group.layers}
            continue
        for layer in group.layers:
            alone.pop(layer.name, None)
        chosen.append((group, readers, stream))
    axes, owners = _number(flow, classes, [group.members for group, _, _ in chosen])
    units: list[Unit] = []
    for (group, readers, stream), touched in zip(chosen, owners):
        start = units[-1].range.stop if units else 0
        units.append(_unit(flow, group, start, readers, touched, stream))
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
    flow: Flow, classes: Tensor, groups: list[Tensor]
) -> tuple[dict[Axis, Tensor], list[list[str]]]:
    """Number the channels of all groups in turn: every axis by channel, parameters by group."""
    numbering = torch.full((flow.atoms.count,), -1)
    members = torch.cat([torch.empty(0, dtype=torch.long), *groups])
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


@dataclass(frozen=True)
class Group:
    """Layers that make the same channels, and those channels by first use."""

    layers: list[Contraction]
    members: Tensor


def _rows(layer: Contraction, atoms: Atoms, classes: Tensor) -> Tensor:
    return classes[atoms.axes[layer.weight, layer.output_axis]]


def _group_producers(
    layers: Sequence[Contraction], atoms: Atoms, classes: Tensor, pinned: Pinned
) -> list[Group]:
    """Layers that share a free channel belong together."""
    owner = torch.full((atoms.count,), -1)  # channel → the first layer that makes it
    merged = list(range(len(layers)))

    def find(i: int) -> int:
        while merged[i] != i:
            merged[i] = merged[merged[i]]
            i = merged[i]
        return i

    first_made: list[Tensor] = []
    for i, layer in enumerate(layers):
        channels = pinned.free(_rows(layer, atoms, classes))
        owners = owner[channels]
        first_made.append(_in_order(channels[owners < 0]))
        owner[first_made[i]] = i
        for other in torch.unique(owners[owners >= 0]).tolist():
            a, b = find(i), find(other)
            merged[max(a, b)] = min(a, b)
    together: dict[int, tuple[dict[str, Contraction], list[Tensor]]] = {}
    for i, layer in enumerate(layers):
        found, parts = together.setdefault(find(i), ({}, []))
        found.setdefault(layer.weight, layer)
        parts.append(first_made[i])
    groups = [Group(list(found.values()), torch.cat(parts)) for found, parts in together.values()]
    return [group for group in groups if len(group.members)]


def _in_order(channels: Tensor) -> Tensor:
    """Each channel once, where it came first."""
    values, place = torch.unique(channels, return_inverse=True)
    if len(values) == len(channels):
        return channels
    first = torch.full_like(values, len(channels))
    first = first.scatter_reduce(0, place, torch.arange(len(channels)), "amin")
    return channels[first.sort().values]


def _readers(
    layers: Sequence[Contraction], atoms: Atoms, classes: Tensor, groups: list[Group]
) -> list[list[str]]:
    """For every group the names of the layers that read any of its channels, in order."""
    group_of = torch.full((atoms.count,), -1)
    for i, group in enumerate(groups):
        group_of[group.members] = i
    found: list[dict[str, None]] = [{} for _ in groups]
    for layer in layers:
        columns = classes[atoms.axes[layer.weight, layer.input_axis]]
        for i in torch.unique(group_of[columns]).tolist():
            if i >= 0:
                found[i][layer.name] = None
    return [list(names) for names in found]


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


def _reason(layer: Contraction, atoms: Atoms, classes: Tensor, pinned: Pinned) -> str:
    return pinned.reason(_rows(layer, atoms, classes)) or "its channels are fixed"


def _unit(
    flow: Flow, group: Group, start: int, readers: list[str], touched: list[str], stream: bool
) -> Unit:
    layers = group.layers
    producers = tuple(
        Producer(c.name, c.weight, c.output_axis, c.bias, norm_behind(flow, c.value_out), c.kind)
        for c in layers
    )
    named = {p.weight for p in producers} | {p.bias for p in producers}
    named |= {flow.weight_of[name] for name in readers}
    between = {name.rpartition(".")[0] or name: None for name in touched if name not in named}
    path = _path(flow, layers[0])
    channels = len(group.members)
    return Unit(
        layers[0].name, start, channels, producers, tuple(readers), tuple(between), path, stream
    )


def norm_behind(flow: Flow, value: int) -> Norm | None:
    """The BatchNorm that alone reads a value."""
    if len(flow.users.get(value, [])) != 1 or value in flow.record.outputs:
        return None
    return flow.norm_at.get(value)


def _path(flow: Flow, layer: Contraction) -> tuple[str, ...]:
    """The calls that a layer's output passes on its first way to a layer that reads it."""
    names: list[str] = []
    value, place = layer.value_out, -1
    while True:
        later = [(i, call) for i, call in flow.users.get(value, []) if i > place]
        if not later or id(later[0][1]) in flow.ends or not later[0][1].outputs:
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
