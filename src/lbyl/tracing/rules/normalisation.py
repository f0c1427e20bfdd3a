"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lbyl.graph.unit import Norm
from lbyl.tracing.labels import Flow, varying
from lbyl.tracing.record import CASTS, Call
from lbyl.tracing.rules.base import argument, input_of, opaque, rule, value_of

STATISTICS = ("running_mean", "running_var")
AFFINE = ("weight", "bias")


@rule("batch_norm", "instance_norm")
def batch_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Channels are normalised one by one; the tensors of their number go along."""
    # `torch.batch_norm` has another order than `F.batch_norm`.
    swapped = call.function in (torch.batch_norm, torch.instance_norm)
    order = (*AFFINE, *STATISTICS) if swapped else (*STATISTICS, *AFFINE)
    x = input_of(call)
    others = [value_of(argument(call, 1 + order.index(n), n)) for n in (*STATISTICS, *AFFINE)]
    location = call.module or call.op
    channels = flow.vector(x, 1, f"its channels vary by position in {location}")
    if flow.record.parameters.get(x) is not None:
        return opaque(flow, call, "normalises a parameter")
    for other in others:
        if other is not None:
            flow.atoms.tie(
                channels, flow.of(other), f"it is normalised with fixed ones in {location}"
            )
    parameters = [None if v is None else flow.record.parameters.get(v) for v in others]
    mean, var, weight, bias = parameters
    if call.op == "batch_norm" and mean is not None and var is not None:
        eps = argument(call, 7, "eps", 1e-5)
        name = mean.rpartition(".")[0]
        flow.norms.append(Norm(name, mean, var, weight, bias, eps, x, call.outputs[0]))
    return [flow.of(x)]


@rule("group_norm")
def group_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Channels of one group are normalised together: whole groups go.

    Their number is an attribute, which follows the weight of its module; without one it stays, and
    with fewer channels it would mean smaller groups.
    """
    x, groups = input_of(call), argument(call, 1, "num_groups")
    weight = value_of(argument(call, 2, "weight"))
    named = None if weight is None else flow.record.parameters.get(weight)
    if groups > 1 and named != f"{call.module}.weight".lstrip("."):
        return opaque(flow, call, "has a number of groups that does not follow its channels")
    channels = flow.vector(x, 1, f"its channels vary by position in {call.module}")
    blocks = channels.reshape(groups, -1)
    reason = f"it is normalised with fixed ones in {call.module}"
    flow.atoms.tie(blocks[:, :1], blocks, reason)
    for position, name in ((2, "weight"), (3, "bias")):
        other = value_of(argument(call, position, name))
        if other is not None:
            flow.atoms.tie(channels, flow.of(other), reason)
    return [flow.of(x)]


@rule("layer_norm", "rms_norm")
def layer_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    """What is normalised together stays together: only channels along other dimensions pass.

    Those of a residual stream may go where a scale takes the correction for the smaller number.
    """
    shape = argument(call, 1, "normalized_shape")
    labels = flow.of(input_of(call))
    dims = range(labels.dim() - len(shape), labels.dim())
    if not set(dims) & set(flow.dims(input_of(call))):
        return [labels]
    weight, bias = value_of(argument(call, 2, "weight")), value_of(argument(call, 3, "bias"))
    if len(shape) != 1 or weight is None or not _takes_scale(flow, labels, weight, bias):
        return opaque(flow, call, "normalises its channels together")
    names = [None if v is None else flow.record.parameters[v] for v in (weight, bias)]
    assert names[0] is not None
    flow.channel_norms.append((names[0], names[1], call.op == "layer_norm", call.outputs[0], 0.0))
    return [labels]


def _takes_scale(flow: Flow, labels: Tensor, weight: int, bias: int | None) -> bool:
    """Whether channels of a residual stream are scaled one by one; scale and shift go along."""
    parameters = [v for v in (weight, bias) if v is not None]
    plain = varying(labels) == [labels.dim() - 1]
    if not (flow.residual and plain and all(v in flow.record.parameters for v in parameters)):
        return False
    channels = labels.reshape(-1, labels.shape[-1])[0]
    for value in parameters:
        flow.atoms.tie(channels, flow.of(value), "it is normalised with fixed ones")
    return True


def is_mean_square(flow: Flow, call: Call) -> bool:
    """Whether a mean over channels is that of an RMSNorm written out in arithmetic.

    `x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`, scaled by a vector behind it.
    """
    square = flow.maker.get(input_of(call))
    rank = len(flow.shape(input_of(call)))
    dim = argument(call, 1, "dim")
    last = [d % rank for d in ([dim] if isinstance(dim, int) else dim or ())] == [rank - 1]
    if not (flow.residual and last and square is not None and _squares(square)):
        return False
    root = _only_reader(flow, _only_reader(flow, call, "add"), "rsqrt")
    scaled = _only_reader(flow, root, "mul")
    cast = _only_reader(flow, scaled, *CASTS)
    weighted = _only_reader(flow, cast or scaled, "mul")
    if root is None or scaled is None or weighted is None:
        return False
    labels = [flow.of(v) for v in scaled.inputs if v not in root.outputs]
    found = [_scale(flow, v) for v in weighted.inputs if v not in (cast or scaled).outputs]
    same = len(labels) == 1 and torch.equal(labels[0], flow.of(square.inputs[0]))
    if not same or len(found) != 1 or found[0] is None:
        return False
    weight, offset = found[0]
    if not _takes_scale(flow, labels[0], weight, None):
        return False
    norm = flow.record.parameters[weight], None, False, weighted.outputs[0], offset
    flow.channel_norms.append(norm)
    return True


def _scale(flow: Flow, value: int) -> tuple[int, float] | None:
    """The parameter that a scale is, and what is added to it: `1 + weight`."""
    offset = 0.0
    while value not in flow.record.parameters:
        call = flow.maker.get(value)
        if call is None or len(call.inputs) != 1 or call.inputs[0] == value:
            return None
        if _name(call) == "add":
            numbers = [x for x in call.args if isinstance(x, (int, float))]
            if len(numbers) != 1 or call.kwargs:
                return None
            offset += numbers[0]
        elif call.op not in CASTS:
            return None
        value = call.inputs[0]
    return value, offset


def _name(call: Call) -> str:
    """A function's name, whether it is written as an operator or in place."""
    name = call.op.strip("_")
    return name[1:] if name in ("radd", "iadd", "rmul", "imul") else name


def _squares(call: Call) -> bool:
    return _name(call) == "square" or (
        _name(call) == "pow" and argument(call, 1, "exponent") in (2, 2.0)
    )


def _only_reader(flow: Flow, call: Call | None, *names: str) -> Call | None:
    """The one call that reads what a call gives, if it has one of these names.

    A cast to the type that is there already gives the same value again and is none.
    """
    if call is None:
        return None
    value = call.outputs[0]
    readers = [other for _, other in flow.users.get(value, []) if value not in other.outputs]
    return readers[0] if len(readers) == 1 and _name(readers[0]) in names else None
