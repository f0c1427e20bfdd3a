"""Functions that work entry by entry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lbyl.tracing.labels import FIXED, Flow, constant_dropped, fixed_labels
from lbyl.tracing.record import Call
from lbyl.tracing.rules.base import argument, input_of, opaque, rule, value_of

ADDITIVE = ["add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__"]
ADDITIVE += ["__isub__", "rsub", "lerp", "addcmul", "maximum", "minimum", "where", "copy_"]

POINTWISE = """
relu relu_ relu6 leaky_relu leaky_relu_ rrelu elu elu_ selu selu_ celu celu_ gelu silu silu_ mish
softplus softsign tanhshrink hardshrink softshrink threshold threshold_ hardtanh hardtanh_
hardswish hardswish_ hardsigmoid hardsigmoid_ sigmoid sigmoid_ logsigmoid tanh tanh_ erf exp log
sqrt rsqrt square pow pow_ __pow__ __rpow__ abs neg __neg__ sign clamp clamp_ clip clamp_min
clamp_max mul mul_ __mul__ __rmul__ __imul__ div div_ __div__ true_divide __truediv__ __rdiv__
__rtruediv__ __itruediv__ reciprocal sin cos floor ceil round trunc nan_to_num logaddexp
dropout dropout1d dropout2d dropout3d dropout_ alpha_dropout feature_dropout feature_alpha_dropout
contiguous clone detach detach_ float half bfloat16 double type cpu cuda requires_grad
identity masked_fill masked_fill_ zeros_like ones_like full_like empty_like data fill_ zero_
__eq__ eq ne __ne__ __lt__ __le__ __gt__ __ge__ lt le gt ge logical_and logical_or logical_not
isnan isinf isfinite __and__ __or__ __invert__ __getattr__ alias
""".split()


@rule(*POINTWISE, *ADDITIVE)
def pointwise(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Operands that meet entry by entry are the same channels."""
    if not call.outputs:  # `x.type()` tells a name
        return []
    if call.op == "where" and len(call.args) + len(call.kwargs) < 3:
        return opaque(flow, call, "tells positions by number")
    shape = flow.shape(call.outputs[0])
    values = list(dict.fromkeys(call.inputs))
    labels = unify(flow, values, shape, call, call.op in ADDITIVE and _sums(flow, values))
    return [labels] * len(call.outputs)


def _sums(flow: Flow, values: list[int]) -> bool:
    """Whether several are activations: a bias or a learned offset belongs to its channel."""
    fixed = flow.constants, flow.record.parameters
    return sum(all(v not in known for known in fixed) for v in values) > 1


def unify(
    flow: Flow, values: list[int], shape: torch.Size, call: Call, added: bool = False
) -> Tensor:
    """Tie the channels of operands that broadcast to `shape`; the labels of the outcome.

    `added` says that the operands are activations that are summed, as in a residual connection.
    """
    rank = len(shape)
    channel_dims = sorted({d + rank - len(flow.shape(v)) for v in values for d in flow.dims(v)})
    if not channel_dims:
        return fixed_labels(shape)
    alone = values[0] if len(values) == 1 else None
    if alone is not None and flow.shape(alone) == shape and alone not in flow.record.parameters:
        return flow.of(alone)
    location = f"{call.op} in {call.module}" if call.module else call.op
    labels = {v: lead(flow.of(v), rank) for v in values}
    operands: list[Tensor] = []
    for value, label in labels.items():
        label = _of_parameter(flow, call, value, label, channel_dims)
        if any(label.shape[d] == 1 and shape[d] > 1 for d in channel_dims):
            # One entry serves many channels (a mask, a scalar): it may not go, they may.
            flow.atoms.pin(label, f"it is broadcast over all channels by {location}")
        else:
            operands.append(label)
    for other in operands[1:]:
        reason = f"it meets a tensor of fixed size at {location}"
        if call.op == "copy_":
            reason = f"it is copied into a tensor of fixed size (a state, a cache) in {call.module}"
        flow.atoms.tie(operands[0], other, reason, added)
    first = next((x for x in operands if bool((constant_dropped(x) != FIXED).any())), None)
    return fixed_labels(shape) if first is None else first.expand(shape)


def lead(labels: Tensor, dims: int) -> Tensor:
    """Labels with leading dimensions of one added, as broadcasting does."""
    if labels.dim() == dims:
        return labels
    return labels.reshape((1,) * (dims - labels.dim()) + tuple(labels.shape))


def _of_parameter(
    flow: Flow, call: Call, value: int, label: Tensor, channel_dims: list[int]
) -> Tensor:
    """A parameter with several long axes is labelled along the one where channels lie."""
    name = flow.record.parameters.get(value)
    shape = flow.shape(value)
    axis = channel_dims[0] - (label.dim() - len(shape))
    if name is None or len(channel_dims) > 1 or axis < 0 or shape[axis] == 1:
        return label
    if sum(size > 1 for size in shape) < 2:
        return label
    flow.accounted.add((id(call), value))
    return lead(flow.along(flow.atoms.axis(name, axis, shape[axis]), value, axis), label.dim())


@rule("to", "type_as")
def cast(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Another tensor may say which type and device; its entries are not read."""
    x = input_of(call)
    flow.accounted.update((id(call), value) for value in call.inputs if value != x)
    return [flow.of(x)]


@rule("prelu")
def prelu(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A slope for all channels, or one for each along dimension 1."""
    labels, weight = flow.of(input_of(call)), value_of(argument(call, 1, "weight"))
    if weight is not None and math.prod(flow.shape(weight)) > 1:
        if labels.dim() < 2:
            return opaque(flow, call, "has a slope for each channel of an input without any")
        slopes = flow.of(weight).reshape([-1 if d == 1 else 1 for d in range(labels.dim())])
        flow.atoms.tie(labels, slopes, f"it meets a fixed slope in {call.module}")
    return [labels]


@rule("glu")
def gated(flow: Flow, call: Call) -> Sequence[Tensor]:
    """The second half of the channels gates the first, entry by entry."""
    a, b = flow.of(input_of(call)).chunk(2, argument(call, 1, "dim", -1))
    flow.atoms.tie(a, b, f"it is gated by a fixed entry in {call.module}")
    return [a]
