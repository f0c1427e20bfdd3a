"""Cutting channels out of a network for good: parameters sliced, attributes made true.

What the design must satisfy: it works on names and axes, so any module is served alike; it only
ever touches a copy; tied parameters stay tied; `print(model)` afterwards tells the truth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.unit import Axis, Graph
from lbyl.runtime.copies import deep_copy
from lbyl.runtime.tensors import laid_out_as, shape_of, tensors
from lbyl.surgery.indices import Kept, indices_on, kept_indices, take
from lbyl.surgery.layout import Attributes, head_attributes, layouts, put_in_place, set_attributes
from lbyl.surgery.refit import refit_attributes


def sliced(
    model: nn.Module, indices: Mapping[Axis, Tensor], but: Collection[str] = ()
) -> dict[str, Tensor]:
    """New values of all parameters that lose channels, nothing else changed, `but` for some."""
    state = tensors(model)
    names = dict.fromkeys(name for name, _ in indices if name not in but)
    if names:  # in one go: there are hundreds
        indices = indices_on(indices, state[next(iter(names))].device)
    return {name: take(state[name].detach(), name, indices) for name in names}


def weightless_copy(model: nn.Module) -> nn.Module:
    """The network with a single zero behind each parameter: shapes without memory."""
    return deep_copy(model, {id(x): shape_of(x) for x in tensors(model).values()})


def copy_model(
    model: nn.Module, without: Collection[str] = (), parameters: bool = True
) -> nn.Module:
    """A deep copy that may be cut; the one given is never touched.

    The tensors named in `without` are not copied, only their shapes: they are about to be replaced.
    A copy that only runs can share `parameters`: what a forward keeps on itself stays out of
    `model` all the same.
    """
    state = tensors(model)
    memo: dict[int, Any] = {
        id(state[name]): shape_of(state[name]) for name in without if name in state
    }
    if not parameters:
        memo = {id(x): x for x in state.values() if isinstance(x, nn.Parameter)} | memo
    try:
        return deep_copy(model, memo)
    except Exception as error:
        raise LbylError(
            f"the model cannot be copied ({error}); copy.deepcopy must work on it"
        ) from error


def cut_for_trial(model: nn.Module, graph: Graph, kept: Kept) -> nn.Module:
    """The network with these channels kept and nothing restored, to run and throw away."""
    values = sliced(model, kept_indices(graph, kept)) | layouts(graph, kept)
    return cut(model, values, head_attributes(model, graph, kept), parameters=False)


def cut(
    model: nn.Module,
    values: Mapping[str, Tensor],
    attributes: Attributes | None = None,
    parameters: bool = True,
) -> nn.Module:
    """A copy of `model` with new values, attributes refitted; further ones as given.

    Without `parameters` those that keep their values are shared with `model`.
    """
    state = tensors(model)
    values = {n: laid_out_as(v, state[n]) if n in state else v for n, v in values.items()}
    slim = copy_model(model, without=values.keys(), parameters=parameters)
    put_in_place(slim, values)
    refit_attributes(slim, model)
    if attributes:
        set_attributes(slim, attributes)
    return slim
