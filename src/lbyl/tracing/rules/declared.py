"""Modules whose behaviour is declared by their class (`lbyl.leaves`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lbyl.graph.declare import declare_named
from lbyl.graph.unit import Norm
from lbyl.tracing.labels import Flow, same_channels, select_first
from lbyl.tracing.record import Call, Ref
from lbyl.tracing.rules.base import opaque


def _given(call: Call) -> int | None:
    """The first tensor that a module is called with; its own come behind in `inputs`."""
    given = [x for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Ref)]
    return given[0].value if given else None


def _has_dims(labels: Tensor, shape: torch.Size, dims: list[int]) -> bool:
    """Whether a shape has the labels' rank, and their sizes along `dims`."""
    return len(shape) == labels.dim() and all(shape[d] == labels.shape[d] for d in dims)


@declare_named("channelwise")
def channelwise(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Channels pass one by one; the module's own tensors of their number go along."""
    x = _given(call)
    if x is None:
        return opaque(flow, call, "is given no tensor")
    labels = flow.of(x)
    dims = flow.dims(x)
    if any(not _has_dims(labels, flow.shape(v), dims) for v in call.outputs):
        return opaque(flow, call, "is declared channelwise but moves its channels")
    if len(dims) > 1:
        return opaque(flow, call, "is declared for channels along one dimension")
    if dims:
        channels = select_first(labels, dims[0])
        for value in dict.fromkeys(call.inputs):
            name, shape = flow.record.parameters.get(value), flow.shape(value)
            if name is not None and len(channels) in shape:
                axis = list(shape).index(len(channels))
                reason = f"it meets fixed entries in {call.module}"
                flow.atoms.tie(channels, flow.atoms.axis(name, axis, shape[axis]), reason)
                flow.accounted.add((id(call), value))
    return [same_channels(labels, flow.shape(v), dims) for v in call.outputs]


@declare_named("FrozenBatchNorm2d", "FrozenBatchNormAct2d")
def frozen_batch_norm(flow: Flow, call: Call) -> Sequence[Tensor]:
    """A BatchNorm written out in arithmetic: known as one, so that corrections can use it."""
    names = {flow.record.parameters.get(v, "").rpartition(".")[2]: v for v in call.inputs}
    tensor_names = ("running_mean", "running_var", "weight", "bias")
    x = _given(call)
    if x is None or not set(tensor_names) <= names.keys():
        return channelwise(flow, call)
    mean, var, weight, bias = (flow.record.parameters[names[n]] for n in tensor_names)
    eps = getattr(flow.record.leaves.get(call.module), "eps", 1e-5)
    flow.norms.append(
        Norm(mean.rpartition(".")[0], mean, var, weight, bias, eps, x, call.outputs[0])
    )
    return channelwise(flow, call)
