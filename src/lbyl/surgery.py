"""Cutting channels out of a network for good: parameters sliced, attributes made true.

What the design must satisfy: it works on names and axes, so any module is served alike; it only
ever touches a copy; tied parameters stay tied; `print(model)` afterwards tells the truth.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.channels import Axis
from lbyl.exceptions import LbylError
from lbyl.leaves import sizes_of
from lbyl.unit import Consumer, Graph

Kept = Mapping[str, Tensor]
"""Unit name → indices of the channels that stay, ascending."""


def surviving(graph: Graph, kept: Kept) -> Tensor:
    """A flag for every channel of the network: does it stay?"""
    count = max((int(index.max()) for index in graph.axes.values()), default=-1) + 1
    alive = torch.ones(count, dtype=torch.bool)
    for name, indices in kept.items():
        unit = graph[name]
        alive[unit.start : unit.range.stop] = False
        alive[unit.start + indices] = True
    return alive


def surviving_indices(graph: Graph, kept: Kept) -> dict[Axis, Tensor]:
    """For every parameter axis that loses something the indices that stay."""
    alive = surviving(graph, kept)
    found: dict[Axis, Tensor] = {}
    for axis, channel in graph.axes.items():
        stays = (channel < 0) | alive[channel.clamp(min=0)]
        if not bool(stays.all()):
            found[axis] = torch.nonzero(stays).reshape(-1)
    return found


def readers_cut(graph: Graph, indices: Mapping[Axis, Tensor]) -> list[Consumer]:
    """The consumers that lose inputs."""
    return [c for c in graph.consumers.values() if (c.weight, c.axis) in indices]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name; tied ones under their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def as_matrix(weight: Tensor, consumer: Consumer) -> Tensor:
    """A consumer's weight as (outputs, inputs, taps) in float64."""
    moved = weight.detach().double().movedim((consumer.output_axis, consumer.axis), (0, 1))
    return moved.reshape(*moved.shape[:2], -1)


def from_matrix(matrix: Tensor, consumer: Consumer, like: Tensor) -> Tensor:
    """Undo `as_matrix`."""
    full = matrix.reshape(*matrix.shape[:2], *like.shape[2:])
    return full.movedim((0, 1), (consumer.output_axis, consumer.axis))


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or Inf: those survive a sum, which needs no memory."""
    # A sum of large finite numbers may overflow; only then every entry is looked at.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def take(tensor: Tensor, name: str, indices: Mapping[Axis, Tensor]) -> Tensor:
    """A parameter with the pruned channels gone from all its axes."""
    for axis in range(tensor.dim()):
        if (name, axis) in indices:
            tensor = tensor.index_select(axis, indices[name, axis].to(tensor.device))
    return tensor


def sliced(model: nn.Module, indices: Mapping[Axis, Tensor]) -> dict[str, Tensor]:
    """New values of all parameters that lose channels, nothing else changed."""
    state = tensors(model)
    names = dict.fromkeys(name for name, _ in indices)
    return {name: take(state[name].detach(), name, indices) for name in names}


def replace_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put new values, of any shape, in place of parameters and buffers; ties are kept."""
    state = tensors(model)
    new = {id(state[name]): value for name, value in values.items() if name in state}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                old = id(parameter)
                value = _aligned(new[old].to(parameter))
                made.setdefault(old, nn.Parameter(value, parameter.requires_grad))
                module._parameters[name] = made[old]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in new:
                module._buffers[name] = _aligned(new[id(buffer)].to(buffer))
    for name in values.keys() - state.keys():
        _add_bias(model, name, values[name])


def _aligned(value: Tensor) -> Tensor:
    """A tensor in memory of its own where it lies askew, as slices of a file do.

    Kernels treat such memory differently, in the last bit of what they compute.
    """
    value = value.contiguous()
    return value.clone() if value.device.type == "cpu" and value.data_ptr() % 64 else value


def _add_bias(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if last not in module._parameters:
        raise LbylError(f"{owner} ({type(module).__name__}) has no place for {last!r}")
    like = next(p for p in module.parameters(recurse=False))
    module._parameters[last] = nn.Parameter(value.to(like), like.requires_grad)


def can_take_bias(model: nn.Module, name: str) -> bool:
    """Whether a bias can be written for the layer of this name, made where it is missing."""
    module = model.get_submodule(name) if name else model
    return "bias" in module._parameters


def refit_attributes(model: nn.Module, original: nn.Module) -> None:
    """Make `out_channels`, `num_features`, `groups`… say what the tensors are."""
    before = dict(original.named_modules())
    for name, module in model.named_modules():
        _refit(module, before.get(name, module))


def _refit(module: nn.Module, before: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.modules.conv._ConvNd) and isinstance(weight, Tensor):
        _refit_conv(module, before)
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        like = weight if weight is not None else module.running_mean
        if like is not None:
            module.num_features = like.shape[0]
    elif isinstance(module, nn.GroupNorm) and weight is not None:
        assert isinstance(before, nn.GroupNorm)
        size = before.num_channels // before.num_groups
        module.num_channels, module.num_groups = weight.shape[0], weight.shape[0] // size
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.shape[0]
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # Hugging Face's GPT-2
        assert isinstance(weight, Tensor)
        module.__dict__.update(nx=weight.shape[0], nf=weight.shape[1])
    for attribute, follows in sizes_of(type(module)).items():
        setattr(module, attribute, len(getattr(module, follows)))


def _refit_conv(module: nn.modules.conv._ConvNd, before: nn.Module) -> None:
    assert isinstance(before, nn.modules.conv._ConvNd)
    rows, columns = module.weight.shape[:2]
    if before.groups > 1:  # whole groups went, so the size of one is unchanged
        module.groups = rows * before.groups // before.weight.shape[0]
    outputs, inputs = (columns, rows) if module.transposed else (rows, columns)
    module.out_channels = outputs * (module.groups if module.transposed else 1)
    module.in_channels = inputs * (1 if module.transposed else module.groups)


def shape_of(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """A stand-in for a parameter or buffer: a single zero behind the shape asked for."""
    empty = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(list(sizes))
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


def weightless_copy(model: nn.Module, indices: Mapping[Axis, Tensor]) -> nn.Module:
    """The cut network with a single zero behind each parameter: shapes without memory."""
    memo: dict[int, object] = {}
    for name, tensor in tensors(model).items():
        shape = [
            len(indices[name, axis]) if (name, axis) in indices else size
            for axis, size in enumerate(tensor.shape)
        ]
        memo[id(tensor)] = shape_of(tensor, shape)
    return copy.deepcopy(model, memo)


def copy_model(model: nn.Module, without: Collection[str] = ()) -> nn.Module:
    """A deep copy that may be cut; the one given is never touched.

    The tensors named in `without` are not copied, only their shapes: they are about to be replaced.
    """
    state = tensors(model)
    memo: dict[int, Any] = {
        id(state[name]): shape_of(state[name], state[name].shape)
        for name in without
        if name in state
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise LbylError(
            f"the model cannot be copied ({error}); detach its non-leaf tensors first"
        ) from error


def cut(model: nn.Module, graph: Graph, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `model` with new values, attributes refitted."""
    slim = copy_model(model, without=values.keys())
    replace_tensors(slim, values)
    refit_attributes(slim, model)
    return slim
