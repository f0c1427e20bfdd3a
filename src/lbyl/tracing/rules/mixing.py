"""Functions that mix along dimensions: pooling, reductions, softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lbyl.tracing.labels import Flow, same_channels, varying
from lbyl.tracing.record import Call
from lbyl.tracing.rules.base import argument, fixed_outputs, input_of, opaque, rule, value_of
from lbyl.tracing.rules.normalisation import is_mean_square
from lbyl.tracing.rules.pointwise import pointwise

POOLING = {
    f"{kind}{n}d": n
    for n in (1, 2, 3)
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
}
POOLING |= {f"max_pool{n}d_with_indices": n for n in (1, 2, 3)}
REDUCTIONS = ["mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp", "nansum"]
REDUCTIONS += ["prod", "median", "any", "all", "argmax", "argmin", "norm", "var_mean", "std_mean"]


def mixing(flow: Flow, call: Call, dims: Sequence[int]) -> list[Tensor]:
    """Values along `dims` are mixed: channels that lie there cannot go one by one."""
    labels = flow.of(input_of(call))
    mixed = {d % max(1, labels.dim()) for d in dims}  # a number passes for one dimension
    if mixed & set(flow.dims(input_of(call))):
        return opaque(flow, call, "mixes its channels")
    outputs = [_reduced(labels, flow.shape(value), mixed) for value in call.outputs]
    kept = [x for x in outputs if x is not None]
    return kept if len(kept) == len(outputs) else opaque(flow, call)


def _reduced(labels: Tensor, shape: torch.Size, mixed: set[int]) -> Tensor | None:
    """The labels of an output of this shape, which lacks the mixed dimensions or has all of them.

    None where the shape is neither.
    """
    if len(shape) < labels.dim():
        for d in sorted(mixed, reverse=True):
            labels = labels.select(d, 0)
    dims = varying(labels)
    if labels.dim() != len(shape) or any(labels.shape[d] != shape[d] for d in dims):
        return None
    return same_channels(labels, shape, dims)


@rule(*POOLING, "interpolate", "upsample", "grid_sample")
def pooling(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Positions are pooled or resampled, all channels alike."""
    rank = len(flow.shape(input_of(call)))
    grid = value_of(argument(call, 1, "grid"))
    if call.op == "grid_sample" and grid is not None:
        flow.atoms.pin(flow.of(grid), "it places samples in grid_sample")
    return mixing(flow, call, range(rank - POOLING.get(call.op, rank - 2), rank))


@rule(*REDUCTIONS)
def reduction(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Dimensions become one number each: those named, or all."""
    if value_of(argument(call, 1, "other")) is not None:  # `torch.max` of two tensors
        return pointwise(flow, call)
    if call.op == "mean" and is_mean_square(flow, call):
        return fixed_outputs(flow, call)
    dim = argument(call, 2 if call.op == "norm" else 1, "dim")
    if dim is None or isinstance(dim, bool):  # `var` also takes `unbiased` in that position
        return mixing(flow, call, range(len(flow.shape(input_of(call)))))
    return mixing(flow, call, _listed(dim))


@rule("softmax", "log_softmax", "cumsum", "cumprod", "sort", "topk", "normalize", "argsort")
def along_dim(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Each entry depends on all others along one dimension."""
    dim = argument(call, 2 if call.op in ("topk", "normalize") else 1, "dim")
    if dim is None:
        dim = _default_dim(call.op, len(flow.shape(input_of(call))))
    return mixing(flow, call, _listed(dim))


def _default_dim(op: str, rank: int) -> int:
    """The dimension torch takes where none is given."""
    if op in ("softmax", "log_softmax"):
        return 0 if rank in (0, 1, 3) else 1
    return 1 if op == "normalize" else -1


def _listed(dims: int | Sequence[int]) -> Sequence[int]:
    return [dims] if isinstance(dims, int) else dims


@rule("roi_align", "roi_pool")
def regions(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Pictures of regions keep their channels; where the regions lie has none."""
    x = input_of(call)
    if len(flow.shape(x)) != 4:
        return opaque(flow, call)
    for value in call.inputs:
        if value != x:
            flow.atoms.pin(flow.of(value), f"it places regions in {call.op}")
    channels = flow.vector(x, 1, f"its channels vary by position in {call.op}")
    return [flow.along(channels, call.outputs[0], 1)]
