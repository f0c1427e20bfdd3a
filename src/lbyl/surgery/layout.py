"""How slim layers lie in code that keeps its sizes, and attributes that say how many heads stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Graph, Unit
from lbyl.runtime.tensors import replace_tensors, tensors
from lbyl.surgery.indices import Kept, kept_along, kept_mask
from lbyl.surgery.modules.attention import SIZES, SlimMultiheadAttention
from lbyl.surgery.modules.masked import INPUTS, OUTPUTS, add_mask, layout

Attributes = Mapping[str, Mapping[str, Any]]
"""Module → attribute → its new value, a whole number or several."""

CHANGED = "cut_attributes"
"""What a module calls the names of its attributes that were changed, so that they are saved."""

WIDTHS = ("all_head_size", "inner_dim", "split_size")  # heads times channels, by the usual names
NOT_COUNTS = ("dim", "size", "per", "norm", "mask", "scale", "bias", "channel")


def layouts(graph: Graph, kept: Kept) -> dict[str, Tensor]:
    """Buffers that tell slim layers where their rows and columns lie, by name."""
    pruned = [graph[n] for n, k in kept.items() if len(k) < graph[n].channels]
    masked = [unit for unit in pruned if unit.masked]
    names = {unit.name for unit in masked}
    values = dict(_sizes(graph, kept, pruned))
    if not masked:
        return values
    cut = {name: k for name, k in kept.items() if not graph[name].masked}
    all_kept, surrounding = kept_mask(graph, kept), kept_mask(graph, cut)
    ends = {(layer.weight, layer.output_axis): (layer.name, OUTPUTS) for layer in graph.layers}
    ends |= {(layer.weight, layer.input_axis): (layer.name, INPUTS) for layer in graph.layers}
    for axis, channel in graph.axes.items():
        if axis in ends and names & {unit.name for unit in graph.units_of[axis]}:
            flags = kept_along(channel, all_kept)[kept_along(channel, surrounding)]
            name, word = ends[axis]
            values[f"{name}.{word}"] = layout(flags)
    return values


def _sizes(graph: Graph, kept: Kept, pruned: list[Unit]) -> Iterator[tuple[str, Tensor]]:
    """New sizes of heads in every `nn.MultiheadAttention` that loses some."""
    for unit in pruned:
        if unit.attention is None or unit.attention.sizes is None:
            continue
        module = unit.attention.module
        heads, channels, of_values, before = unit.attention.sizes
        for kind, name in (
            ("heads", f"{module}:heads"),
            ("qk", f"{module}:qk"),
            ("v", f"{module}:v"),
        ):
            if name not in kept or name not in graph.names:
                continue
            count, whole = len(kept[name]), graph[name].channels
            heads = heads * count // whole if kind == "heads" else heads
            channels = channels * count // whole if kind == "qk" else channels
            of_values = of_values * count // whole if kind == "v" else of_values
        yield f"{module}.{SIZES}", torch.tensor([heads, channels, of_values, before])


def head_attributes(model: nn.Module, graph: Graph, kept: Kept) -> dict[str, dict[str, int]]:
    """Attributes that say how many heads there are, as they must be when some are cut for good."""
    found: dict[str, dict[str, int]] = {}
    for module, count, whole in _cut_heads(graph, kept):
        values = _head_counts(model.get_submodule(module))
        found[module] = {n: v * count // whole for n, v in values.items() if v % whole == 0}
    return found


def present_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Attributes that were changed when a model was cut, as it has them."""
    found = {}
    for module, owner in model.named_modules():
        if names := owner.__dict__.get(CHANGED):
            found[module] = {name: getattr(owner, name) for name in names}
    return found


def _cut_heads(graph: Graph, kept: Kept) -> Iterator[tuple[str, int, int]]:
    """Modules whose heads are cut for good, with how many of how many stay."""
    for unit in graph.units:
        attention, indices = unit.attention, kept.get(unit.name)
        if unit.kind != "heads" or unit.masked or attention is None or indices is None:
            continue
        if attention.sizes is None:
            for module in dict.fromkeys((attention.module, *attention.called_in)):
                yield module, len(indices), unit.channels


def _head_counts(module: nn.Module) -> dict[str, int]:
    """Attributes of a module that count heads, or their channels altogether."""
    found = {}
    for name, value in vars(module).items():
        counts = "head" in name and not any(word in name for word in NOT_COUNTS)
        if type(value) is int and value > 0 and (counts or name in WIDTHS):
            found[name] = value
    return found


def whole_numbers(value: Any) -> list[int]:
    """The whole numbers that an attribute is, or holds and nothing else."""
    several = list(value) if type(value) in (list, tuple) else [value]
    return several if all(type(x) is int for x in several) else []


def set_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Give modules their new attributes; several numbers stay a tuple, or a list."""
    for module, values in attributes.items():
        owner = model.get_submodule(module)
        for name, value in values.items():
            several = isinstance(value, (list, tuple))
            setattr(owner, name, type(getattr(owner, name))(value) if several else value)
        if values:
            owner.__dict__[CHANGED] = sorted({*owner.__dict__.get(CHANGED, ()), *values})


def put_in_place(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put new values in place, in a model: tensors of any shape, and how slim layers lie."""
    new = {name for name in values.keys() - tensors(model).keys() if is_layout(name)}
    replace_tensors(model, {name: value for name, value in values.items() if name not in new})
    for name in new:
        _add_layout(model, name, values[name])


def is_layout(name: str) -> bool:
    """Whether a tensor of this name says how a slim layer lies in what surrounds it."""
    return name.rpartition(".")[2] in (OUTPUTS, INPUTS, SIZES)


def fits_layout(name: str, value: Tensor, values: Mapping[str, Tensor]) -> bool:
    """Whether such a tensor tells places that the weights beside it can lie in."""
    owner, _, last = name.rpartition(".")
    if value.dtype != torch.long or value.dim() != 1 or len(value) < 2 or bool((value < 0).any()):
        return False
    if last == SIZES:
        heads, channels, of_values = value[:3].tolist() if len(value) == 4 else (0, 0, 0)
        weight = values.get(f"{owner}.in_proj_weight")
        rows = heads * (2 * channels + of_values)
        return weight is not None and rows == len(weight) > 0 and int(value[3]) > 0
    weight = values.get(f"{owner}.weight")
    ascending = bool((value.diff() > 0).all())
    return weight is not None and ascending and len(value) - 1 in weight.shape


def _add_layout(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    value = value.to(next(module.parameters()).device)
    if last == SIZES:
        assert isinstance(module, nn.MultiheadAttention)
        SlimMultiheadAttention.of(module, value)
    else:
        add_mask(module, last, value)
