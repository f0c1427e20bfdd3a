"""Functions that move data and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lbyl.runtime.run import tensors_in
from lbyl.tracing.labels import (
    FIXED,
    Flow,
    constant_dropped,
    distinct,
    same_channels,
    varying,
)
from lbyl.tracing.record import Call, Ref
from lbyl.tracing.rules.base import argument, fixed_outputs, input_of, opaque, rule, value_of

MOVEMENT = """
flatten reshape view view_as reshape_as permute transpose transpose_ swapaxes swapdims movedim
moveaxis t T mT squeeze unsqueeze squeeze_ unsqueeze_ unflatten ravel
cat concat concatenate stack hstack vstack chunk split tensor_split split_with_sizes unbind
narrow select flip roll expand expand_as repeat tile repeat_interleave
broadcast_to pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
meshgrid atleast_2d rot90 unfold_copy
""".split()

RESHAPING = ("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel")
JOINING = ("cat", "concat", "concatenate")


@rule(*MOVEMENT)
def movement(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Labels are moved by the same call that moved the data."""
    if not any(flow.marked(v) for v in call.inputs):
        return fixed_outputs(flow, call)
    refusal = why_not_moved(flow, call)
    if refusal is not None:
        return opaque(flow, call, refusal)
    outputs = moved(flow, call, flow.of)
    if call.op in ("chunk", "split", "tensor_split", "split_with_sizes", "unbind"):
        _tie_pieces(flow, outputs, call)
    elif call.op in ("narrow", "select"):
        pin_cut(flow, outputs, call)
    elif call.op == "roll":
        _pin_shifted(flow, outputs[0], call)
    elif call.op == "pixel_shuffle":
        return [_tie_along(flow, x, [x.dim() - 2, x.dim() - 1], call) for x in outputs]
    else:
        return [_tie_blocks(flow, x, call) for x in outputs]
    return outputs


def why_not_moved(flow: Flow, call: Call) -> str | None:
    """Why labels cannot be moved as the data was; None where they can."""
    ranks = {len(flow.shape(v)) for v in call.inputs}
    entries = [flow.shape(v).numel() for v in (input_of(call), *call.outputs[:1])]
    # An empty tensor counts as one entry, so shapes with a 0 do not fit its labels.
    if call.op in RESHAPING and len(set(entries)) > 1:
        return "changes the number of entries"
    if call.op in JOINING and len(ranks) > 1:
        return "joins tensors of different rank"
    sizes = argument(call, 1, "split_size_or_sections")
    if call.op in ("split", "split_with_sizes") and isinstance(sizes, (list, tuple)):
        whole = flow.shape(input_of(call))[argument(call, 2, "dim", 0)]
        if sum(sizes) != whole:  # of an empty tensor, which counts as one entry
            return "divides an empty tensor"
    counts = {"tensor_split": "tensor_indices_or_sections", "repeat_interleave": "repeats"}
    if call.op in counts and value_of(argument(call, 1, counts[call.op])) is not None:
        return "is steered by values"
    return None


def moved(flow: Flow, call: Call, of: Callable[[int], Tensor]) -> list[Tensor]:
    """The labels of the outputs: what the call makes of its inputs' labels, given by `of`."""
    if call.op in RESHAPING:
        return [of(input_of(call)).reshape(flow.shape(call.outputs[0]))]
    if call.op in JOINING:
        return [_joined(call, of)]
    return _called(call, of)


def _called(call: Call, of: Callable[[int], Tensor]) -> list[Tensor]:
    """What a call gives of labels in place of tensors."""
    args, kwargs = (_labelled(x, of) for x in (call.args, call.kwargs))
    moved: Any = call.function(*args, **kwargs)
    return tensors_in(moved)


def _labelled(x: Any, of: Callable[[int], Tensor]) -> Any:
    """Arguments of a call with labels in place of tensors."""
    if isinstance(x, Ref):
        return of(x.value)[...]  # a view: one in place, such as `squeeze_`, leaves those kept
    if type(x) in (tuple, list):
        return type(x)([_labelled(item, of) for item in x])
    if type(x) is dict:
        return {key: _labelled(item, of) for key, item in x.items()}
    return tree_map_only(Ref, lambda r: of(r.value)[...], x)


def _joined(call: Call, of: Callable[[int], Tensor]) -> Tensor:
    """Labels joined as the data was, one entry along each dimension that all are constant along."""
    parts = [of(value) for value in call.inputs]
    shape = list(parts[0].shape)
    along = argument(call, 1, "dim", 0) % len(shape)
    constant = [
        d
        for d, size in enumerate(shape)
        if d != along and size > 1 and all(x.shape[d] == size and not x.stride(d) for x in parts)
    ]

    def narrowed(value: int) -> Tensor:
        labels = of(value)
        for d in constant:
            labels = labels.narrow(d, 0, 1)
        return labels

    joined = _called(call, narrowed)[0]
    shape[along] = joined.shape[along]
    return joined.expand(shape)


def _tie_pieces(flow: Flow, pieces: list[Tensor], call: Call) -> None:
    """Equal pieces must stay equal in size, so their channels go together, position by position."""
    source, dims = flow.of(input_of(call)), flow.dims(input_of(call))
    changed = [d for d in dims if any(x.dim() <= d for x in pieces)]
    changed += [
        d for d in dims if d not in changed and any(x.shape[d] != source.shape[d] for x in pieces)
    ]
    if not changed:
        return
    if any(x.shape != pieces[0].shape for x in pieces):
        flow.atoms.pin(source, f"it is cut into unequal pieces in {call.module or call.op}")
        return
    for other in pieces[1:]:
        flow.atoms.tie(pieces[0], other, f"it is cut beside fixed entries in {call.module}")


def pin_cut(flow: Flow, outputs: list[Tensor], call: Call) -> None:
    """Indices written in the code do not move with the channels: what they cut is pinned."""
    source = flow.of(input_of(call))
    kept = distinct(torch.cat([constant_dropped(out).reshape(-1) for out in outputs]))
    if not bool(torch.isin(distinct(constant_dropped(source)), kept).all()):
        flow.atoms.pin(source, f"it is indexed by fixed positions in {call.module or call.op}")


def _pin_shifted(flow: Flow, out: Tensor, call: Call) -> None:
    """Channels shifted round by a count stay: with fewer of them others would come round."""
    source = flow.of(input_of(call))
    if not torch.equal(out, source):
        flow.atoms.pin(source, f"it is shifted among its channels in {call.module or call.op}")


def _tie_blocks(flow: Flow, out: Tensor, call: Call) -> Tensor:
    """Channels split over two dimensions stay equal per block: blocks go position by position."""
    dims = varying(out)
    if len(dims) > 1 and all(len(flow.dims(v)) < len(dims) for v in call.inputs):
        return _tie_along(flow, out, dims[:1], call)
    return out


def _tie_along(flow: Flow, labels: Tensor, dims: Sequence[int], call: Call) -> Tensor:
    """Channels that differ only in their position along `dims` go together, under one label."""
    first = labels
    for d in dims:
        first = first.narrow(d, 0, 1)
    flow.atoms.tie(first, labels, f"it is regrouped beside fixed entries in {call.module}")
    return first.expand(labels.shape)


@rule("pad")
def pad(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Padding around channels is fixed; padding around pixels leaves them as they were."""
    labels, widths = flow.of(input_of(call)), argument(call, 1, "pad")
    dims = flow.dims(input_of(call))
    padded = {labels.dim() - 1 - i // 2 for i, width in enumerate(widths) if width}
    if not padded & set(dims):
        return [same_channels(labels, flow.shape(call.outputs[0]), dims)]
    if argument(call, 2, "mode", "constant") != "constant":
        return opaque(flow, call, "repeats channels at fixed positions")
    out = F.pad(labels.contiguous(), list(widths), value=FIXED)
    pin_cut(flow, [out], call)  # a negative width crops
    return [out]
