"""What modules keep beside their weights, remembered and put back.

A `forward` may write: it counts its calls, keeps an average, or holds on to its last input. So that
each run begins with the state that a network was given with, and ends with it, everything that code
can write on modules is remembered before the first: buffers, attributes, and lists, dicts and plain
objects of such. Parameters are left out, for no run changes them; but for those that are named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lbyl.runtime.copies import ATOMS

OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # of every module
ROOM = frozenset(vars(nn.Module())) - {*OWN, "training"}  # for hooks, of which none is state
FOREIGN = ("torch", "builtins", "numpy", "functools", "collections", "threading")


class State:
    """The state of a network as it was when this was made."""

    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], list[Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []  # of NumPy
        self._seen: set[int] = set()
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._look([model])
            for name, parameter in model.named_parameters() if written else ():
                if name in written:
                    self._remember(parameter)

    def _look(self, waiting: list[Any]) -> None:
        """Remember what these hold, and what is in them."""
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in ATOMS or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, nn.Parameter):
                self._gradients.append((value, value.grad))
            elif isinstance(value, Tensor):
                self._remember(value)
            elif isinstance(value, torch.jit.ScriptModule):  # its attributes are kept elsewhere
                waiting += value.buffers()
            elif isinstance(value, nn.Module):
                self._keep(value.__dict__)
                waiting += _attributes(value)
            elif isinstance(value, dict):
                self._keep(value)
                waiting += value.values()
            elif isinstance(value, (list, deque)):
                self._lists.append((value, list(value)))
                waiting += value
            elif isinstance(value, set):
                self._sets.append((value, set(value)))
            elif isinstance(value, tuple):
                waiting += value
            elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
                self._arrays.append((value, value.copy()))
            elif _is_plain(value):
                self._keep(value.__dict__)
                waiting += value.__dict__.values()

    def _keep(self, values: dict[Any, Any]) -> None:
        self._seen.add(id(values))
        self._dicts.append((values, dict(values), list(values.values())))

    def _remember(self, tensor: Tensor) -> None:
        usual = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        # One number behind a whole shape, as of stand-ins, is nothing that can be written to.
        if usual and type(tensor) in (Tensor, nn.Parameter) and 0 not in tensor.stride():
            self._tensors.append((tensor, tensor.detach().clone()))

    def put_back(self) -> None:
        """Everything as it was, bit for bit."""
        for values, before, each in self._dicts:
            if len(values) != len(each) or not all(map(is_, values.values(), each)):
                values.clear()
                values.update(before)
        for several, items in self._lists:
            if len(several) != len(items) or not all(map(is_, several, items)):
                several.clear()
                several.extend(items)
        for some, members in self._sets:
            if some != members:
                some.clear()
                some.update(members)
        for array, numbers in self._arrays:
            if array.tobytes() != numbers.tobytes():
                array[...] = numbers
        with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
            for parameter, gradient in self._gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            for tensor, value in self._tensors:
                _write(tensor, value)


def _attributes(module: nn.Module) -> Iterator[Any]:
    """What is kept on a module."""
    for name, value in module.__dict__.items():
        if type(value) not in ATOMS and name not in ROOM:
            yield value


def _is_plain(value: object) -> bool:
    """Whether an object is its attributes."""
    foreign = type(value).__module__.partition(".")[0] in FOREIGN
    return not foreign and isinstance(getattr(value, "__dict__", None), dict)


def _write(tensor: Tensor, value: Tensor) -> None:
    """A value into a tensor, unless it is there; nobody asks a device, which would be waited for.

    By way of `data`, so that gradients still to be computed do not take it for a change.
    """
    if tensor.shape != value.shape or tensor.dtype != value.dtype or tensor.device != value.device:
        tensor.data = value.clone()
    elif tensor.is_cuda or not torch.equal(tensor, value):
        tensor.data.copy_(value)
