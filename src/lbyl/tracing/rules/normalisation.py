"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lbyl.graph.unit import Norm
from lbyl.tracing.labels import Flow, varying
from lbyl.tracing.record import Call
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
    """What is normalised together stays together: only channels along other dimensions pass."""
    shape = argument(call, 1, "normalized_shape")
    labels = flow.of(input_of(call))
    dims = range(labels.dim() - len(shape), labels.dim())
    if set(dims) & set(varying(labels)):
        return opaque(flow, call, "normalises its channels together")
    return [labels]
