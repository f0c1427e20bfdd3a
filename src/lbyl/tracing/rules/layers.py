"""Layers that sum over channels: convolution, linear, products, attention, embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lbyl.graph.unit import Layer
from lbyl.tracing.labels import Flow
from lbyl.tracing.record import Call
from lbyl.tracing.rules.base import argument, input_of, opaque, rule, value_of


def _parameter_name(flow: Flow, x: Any) -> str | None:
    """The name of an argument that is a parameter, None for anything else."""
    value = value_of(x)
    return None if value is None else flow.record.parameters.get(value)


def _layer(
    flow: Flow,
    call: Call,
    kind: str,
    x: int,
    weight: Any,
    bias: Any,
    groups: int = 1,
    dim: int = -1,
) -> Sequence[Tensor]:
    """Tie inputs to the weight's columns; its rows are the channels that come out.

    `x` is the input, with its channels along `dim`; `weight` and `bias` are the call's arguments.
    """
    name, bias_name = _parameter_name(flow, weight), _parameter_name(flow, bias)
    if name is None or (bias is not None and bias_name is None):
        if call.module:
            flow.refused[call.module] = "its weight is computed in the forward pass"
        return opaque(flow, call, "computes its weight in the forward pass")
    if len(flow.shape(weight.value)) < 2:
        return opaque(flow, call, "sums all its inputs into one number")
    kind_of = flow.record.forms[weight.value].dtype
    if not kind_of.is_floating_point:  # regression is in real numbers
        numbers = "complex numbers" if kind_of.is_complex else "integers"
        flow.refused[name.removesuffix(".weight")] = f"its weights are {numbers}"
        return opaque(flow, call, f"multiplies by {numbers}")
    flow.accounted.add((id(call), weight.value))
    if groups > 1:
        flow.grouped.add(name)
    axes = (0, 1) if kind in ("transposed", "matmul") else (1, 0)
    location, size = call.module or name, flow.shape(weight.value)
    columns = flow.vector(x, dim, f"its channels vary by position at {location}")
    if name in flow.grouped:
        rows = _whole_groups(flow, name, size, columns, groups, kind, location)
    else:
        inputs, rows = (flow.atoms.axis(name, axis, size[axis]) for axis in axes)
        flow.atoms.tie(inputs, columns, f"it meets fixed entries at the input of {location}")
    if bias_name is not None:
        flow.atoms.tie(rows, flow.of(bias.value), f"it has a fixed bias in {location}")
    out = call.outputs[0]
    shape = flow.shape(x if kind == "transposed" else out)
    positions = math.prod(shape) // shape[dim]
    owner, kind = name.removesuffix(".weight"), "linear" if kind == "matmul" else kind
    flow.layers.append(
        Layer(owner, name, bias_name, *axes, groups, kind, x, out, positions, id(call))
    )
    return [flow.along(rows, out, dim % len(flow.shape(out)))]


def _whole_groups(
    flow: Flow, name: str, size: torch.Size, columns: Tensor, groups: int, kind: str, location: str
) -> Tensor:
    """Inputs and outputs of a group of a grouped convolution form one channel."""
    rows = flow.atoms.axis(name, 0, size[0])
    reason = f"it shares a group with fixed entries in {location}"
    flow.atoms.tie(columns.reshape(groups, -1)[:, :1], columns.reshape(groups, -1), reason)
    flow.atoms.tie(columns.reshape(groups, -1)[:, :1], rows.reshape(groups, -1), reason)
    if kind == "transposed":
        return rows.reshape(groups, -1)[:, :1].expand(-1, size[1]).reshape(-1)
    return rows


@rule("conv1d", "conv2d", "conv3d")
def conv(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A convolution; its channels lie before the positions, with or without a batch."""
    return _convolution(flow, call, "conv")


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A transposed convolution, whose weight has inputs first."""
    return _convolution(flow, call, "transposed")


def _convolution(flow: Flow, call: Call, kind: str) -> Sequence[Tensor]:
    weight, bias = argument(call, 1, "weight"), argument(call, 2, "bias")
    groups = argument(call, 6, "groups", 1)
    dim = 1 - len(flow.shape(weight.value))
    return _layer(flow, call, kind, input_of(call), weight, bias, groups, dim)


@rule("linear")
def linear(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A linear layer; its channels lie along the last dimension."""
    weight, bias = argument(call, 1, "weight"), argument(call, 2, "bias")
    return _layer(flow, call, "linear", input_of(call), weight, bias)


@rule("addmm")
def addmm(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A linear layer as `bias + x @ weight`."""
    if any(call.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return opaque(flow, call, "scales its weight or bias")
    bias, x, weight = (argument(call, i, n) for i, n in enumerate(("input", "mat1", "mat2")))
    return _layer(flow, call, "matmul", x.value, weight, bias)


@rule("matmul", "__matmul__", "mm", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")
def product(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A product with a parameter is a linear layer; one of activations is opaque, but costs."""
    if call.op in ("matmul", "__matmul__", "mm"):
        weight = argument(call, 1, "mat2" if call.op == "mm" else "other")
        if _parameter_name(flow, weight) is not None and len(flow.shape(weight.value)) == 2:
            return _layer(flow, call, "matmul", input_of(call), weight, None)
    flow.fixed_macs += _product_macs(flow, call)
    return opaque(flow, call, "mixes its channels")


def _product_macs(flow: Flow, call: Call) -> int:
    """Multiply–accumulates of a product of activations; of an einsum they are not known."""
    if call.op == "einsum":
        return 0
    if call.op == "scaled_dot_product_attention":
        q, k, v = (
            flow.shape(argument(call, i, n).value) for i, n in enumerate(("query", "key", "value"))
        )
        return math.prod(q) * k[-2] + math.prod(q[:-1]) * math.prod(v[-2:])
    summed = flow.shape(call.inputs[-2])[-1]
    return math.prod(flow.shape(call.outputs[0])) * summed


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A recurrent layer: what enters and leaves is unprunable, its MACs are counted."""
    steps = math.prod(flow.shape(call.inputs[0])[:-1])  # of all examples together
    matrices = [flow.shape(v) for v in call.inputs if v in flow.record.parameters]
    flow.fixed_macs += steps * sum(math.prod(shape) for shape in matrices if len(shape) == 2)
    return opaque(flow, call)


@rule("multi_head_attention_forward")
def attention(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Attention mixes channels of all heads: they are unprunable, its MACs counted."""
    query, key = (flow.shape(argument(call, i, n).value) for i, n in enumerate(("query", "key")))
    length, keys, width = query[0], key[0], query[-1]
    batch = query[1] if len(query) == 3 else 1  # without a batch: (length, width)
    projections = 2 * (length + keys) * batch * width * width
    flow.fixed_macs += projections + 2 * batch * length * keys * width
    return opaque(flow, call, "mixes its channels")


@rule("embedding")
def embedding(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Rows of a table, whose columns are channels; they go only with those of a residual sum."""
    table, limit = argument(call, 1, "weight"), argument(call, 3, "max_norm")
    name = _parameter_name(flow, table)
    if flow.residual and name is not None and limit is None:
        flow.accounted.add((id(call), table.value))
        flow.tables.add(name)
        columns = flow.atoms.axis(name, 1, flow.shape(table.value)[1])
        return [flow.along(columns, call.outputs[0], len(flow.shape(call.outputs[0])) - 1)]
    return opaque(flow, call, "looks its channels up in a table")
