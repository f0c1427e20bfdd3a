"""Reading and writing at indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lbyl.tracing.labels import Flow, constant_dropped, varying
from lbyl.tracing.record import Call, Ref
from lbyl.tracing.rules.base import argument, fixed_outputs, input_of, opaque, rule, value_of
from lbyl.tracing.rules.movement import pin_cut


@rule("__getitem__", "index_select")
def indexing(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Indices that are tensors hold no values here: they may only range over equal labels."""
    labels = flow.of(input_of(call))
    shape = flow.shape(call.outputs[0])
    index = _index(call, labels.dim())
    if any(_hides_tensor(i) for i in index):
        return opaque(flow, call, "is steered by values")
    index = tuple(_as_tensor(i) if isinstance(i, list) else i for i in index)
    if not any(isinstance(i, Ref) for i in index):
        out = labels[index]
        pin_cut(flow, [out], call)
        return [out]
    if any(flow.marked(i.value) for i in index if isinstance(i, Ref)):
        return opaque(flow, call, "is steered by its values")
    at_zero, looked_up = _anywhere(flow, index, labels.dim())
    if set(flow.dims(input_of(call))) & looked_up:
        return opaque(flow, call, "picks channels by number")
    out = labels[at_zero].expand(shape)
    pin_cut(flow, [out], call)
    return [out]


def _index(call: Call, rank: int) -> tuple[Any, ...]:
    """What stands in the brackets of `x[…]`, one entry for each comma."""
    if call.op == "index_select":
        before = (slice(None),) * (argument(call, 1, "dim") % max(1, rank))
        return (*before, argument(call, 2, "index"))
    return call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)


def _hides_tensor(index: Any) -> bool:
    """Whether tensors stand inside a slice or a list, where the record gives them no number."""
    if isinstance(index, slice):
        return any(isinstance(x, (Tensor, Ref)) for x in (index.start, index.stop, index.step))
    return isinstance(index, list) and any(isinstance(x, Ref) for x in tree_flatten(index)[0])


def _as_tensor(index: list[Any]) -> Tensor:
    return torch.tensor(index) if index else torch.zeros(0, dtype=torch.long)


def _anywhere(flow: Flow, index: tuple[Any, ...], rank: int) -> tuple[tuple[Any, ...], set[int]]:
    """The index with 0 wherever a tensor stood, and the dimensions tensors range over."""

    def consumed(i: Any) -> int:
        if i is None or i is Ellipsis:
            return 0
        return _indexed_dims(flow, i)

    gap = rank - sum(map(consumed, index))
    at_zero: list[Any] = []
    looked_up: set[int] = set()
    dim = 0
    for i in index:
        if isinstance(i, Ref):
            looked_up |= set(range(dim, dim + consumed(i)))
            if flow.record.whole[i.value]:
                at_zero.append(torch.zeros(flow.shape(i.value), dtype=torch.long))
            else:  # a mask: as many entries as the outcome shows
                at_zero += [torch.zeros(1, dtype=torch.long)] * consumed(i)
        else:
            at_zero.append(i)
        dim += gap if i is Ellipsis else consumed(i)
    return tuple(at_zero), looked_up


# Tensors that hold the same number everywhere fit any channels; the trial cut sees whether their
# size follows the channels.
BLANK = "zeros ones full empty new_zeros new_ones new_full new_empty".split()


@rule(*BLANK)
def blank(flow: Flow, call: Call) -> Sequence[Tensor]:
    flow.blank.update(call.outputs)
    return fixed_outputs(flow, call)


@rule("__setitem__")
def write(flow: Flow, call: Call) -> Sequence[Tensor]:
    """Writing along dimensions without channels: target and source have the same channels."""
    target, written = call.args[0].value, value_of(call.args[2])
    index = _index(call, len(flow.shape(target)))
    if written is None or not all(_is_plain(flow, i) for i in index):
        return opaque(flow, call, "writes in a way that has no channel rule")
    touched = sum(_indexed_dims(flow, i) for i in index)
    source = _inner(flow.of(written), len(flow.shape(target)) - touched)
    if source is None or set(flow.dims(target)) & set(range(touched)):
        return opaque(flow, call, "writes channels at positions given by number")
    if target not in flow.blank:
        reason = f"it is written beside fixed entries in {call.module}"
        flow.atoms.tie(flow.of(target), source, reason)
    return [source.expand(flow.shape(target))]


def _is_plain(flow: Flow, index: Any) -> bool:
    """Whether an index stands for known dimensions and is not made of channels."""
    if isinstance(index, Ref):
        return not flow.marked(index.value)
    return isinstance(index, (slice, int)) and not isinstance(index, bool)


def _indexed_dims(flow: Flow, index: Any) -> int:
    """How many dimensions an index takes: a mask as many as it has, anything else one."""
    if isinstance(index, Ref) and not flow.record.whole[index.value]:
        return len(flow.shape(index.value))
    return 1


def _inner(labels: Tensor, rank: int) -> Tensor | None:
    """Labels along the last `rank` dimensions, which are written whole.

    None where there are fewer, or where channels lie along the dimensions before.
    """
    labels = constant_dropped(labels)
    outer = labels.dim() - rank
    if outer < 0 or any(d < outer for d in varying(labels)):
        return None
    return labels[(0,) * outer]
