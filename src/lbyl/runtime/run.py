"""Running a model: its inputs in any accepted form, its mode, its device, its outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.runtime.copies import set_modes
from lbyl.runtime.habits import current
from lbyl.runtime.session import begin_again
from lbyl.runtime.state import State

Inputs = Any
"""Example inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments; an
iterator of several such where a network has paths that one does not reach."""


@dataclass(frozen=True)
class Examples:
    """Several example inputs, each for another path through a network."""

    each: tuple[Inputs, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> Inputs:
        """What an iterator gives; anything else is one example and stays as it is."""
        if not isinstance(inputs, Iterator):
            return inputs
        each = tuple(inputs)
        tensors = [[x for x in tree_flatten(one)[0] if isinstance(x, Tensor)] for one in each]
        batches = {len(some[0]) if some and some[0].dim() else 1 for some in tensors}
        if len(batches) != 1:
            raise LbylError(
                f"an iterator of example inputs gave batches of {sorted(batches)} examples: give "
                "one example of the same batch size for each path"
            )
        return cls(each)


register_pytree_node(Examples, lambda e: (list(e.each), None), lambda e, _: Examples(tuple(e)))


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """`model` applied to example inputs of any of the accepted forms.

    It gets copies: some networks change their inputs in place (`x *= 255`), and what one run did
    would be the next run's input.
    """
    return call_on_these(model, tree_map_only(Tensor, Tensor.clone, inputs))


def call_on_these(model: nn.Module, inputs: Inputs) -> Any:
    """`model` applied to the very tensors given, for who must know them again.

    In `evaluation_mode` what the call writes on modules is undone after it.
    """
    if isinstance(inputs, Examples):
        return [call_on_these(model, each) for each in inputs.each]
    try:
        if torch.is_grad_enabled():
            return _called(model, inputs)
        with torch.set_grad_enabled(current().differentiates):
            out = _called(model, inputs)
        if any(x.requires_grad for x in tensors_in(out)):  # of gradients that it asked for itself
            out = tree_map_only(Tensor, Tensor.detach, out)
        return out
    except Exception as error:
        error.__dict__.setdefault(RAN_ON, described(inputs))
        raise
    finally:
        state = _states().get(id(model))
        if state is not None:
            state.put_back()


def call_as_in_use(model: nn.Module, inputs: Inputs) -> Any:
    """`model` applied with nothing done around it, for who times it.

    In `evaluation_mode` what the calls write on modules is undone at the end.
    """
    if isinstance(inputs, Examples):
        return [call_as_in_use(model, each) for each in inputs.each]
    if not current().differentiates:
        return _called(model, inputs)
    with torch.enable_grad():
        return _called(model, inputs)


def _called(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


RAN_ON = "_lbyl_ran_on"  # an attribute of errors that a network raised
_here = threading.local()


def ran_on(error: Exception) -> str | None:
    """What a network ran on when it raised this error; None where none raised it."""
    told: str | None = error.__dict__.get(RAN_ON)
    return told


def _states() -> dict[int, State]:
    """The networks in evaluation mode in this thread, by id, with the state that they had."""
    states: dict[int, State] = _here.__dict__.setdefault("states", {})
    return states


def uncompiled(model: nn.Module) -> nn.Module:
    """The network inside of what `torch.compile` gave; any other as it is.

    To look on while a compiled network runs would compile it anew, again and again.
    """
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU for a model without parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def tensors_in(output: Any, depth: int = 4) -> list[Tensor]:
    """Every tensor in a model's output, whatever containers or dataclasses hold it."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (list, tuple)):
        parts = list(output)
    else:
        parts = list(getattr(output, "__dict__", {}).values())
    return [x for part in parts for x in tensors_in(part, depth - 1)] if depth else []


def dense(x: Tensor) -> Tensor:
    """The numbers of a tensor that may be sparse."""
    return x if x.layout is torch.strided else x.to_dense()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode inside, every submodule's own mode back afterwards.

    What its `forward` writes on modules is undone after each call and at the end, so that each run
    begins with the state given. What it draws at random (some keep their dropout in evaluation) is
    the same every time, so that two networks compared differ by their weights alone.
    """
    training = any(module.training for module in _modules(model))
    modes = {name: m.training for name, m in model.named_modules()} if training else {}
    states = _states()
    outer = states.get(id(model))
    begin_again()
    if training:
        model.eval()
    try:
        state = states[id(model)] = outer or State(model, current().writes)
        try:
            yield
        finally:
            state.put_back()
    finally:
        if outer is None:
            states.pop(id(model), None)
        if training:
            set_modes(model, modes)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a network; one that is there twice may come twice."""
    yield model
    waiting = [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None:
                yield module
                if module._modules:
                    waiting.append(module)


Progress = Callable[[str, int, int], None]
"""Called with the stage's name, steps done and steps in all."""


def described(inputs: Inputs) -> str:
    """Shapes and types of example inputs, for an error message."""
    tensors = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]
    return ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors)


def example_shape(example_inputs: Inputs) -> tuple[int, ...]:
    """The shape of one example, of the first tensor where there are several."""
    first = next((x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor)), None)
    if first is None:
        raise LbylError("the example inputs hold no tensor to model inputs on; give data=")
    return tuple(first.shape[1:])
