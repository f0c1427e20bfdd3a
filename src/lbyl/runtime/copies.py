"""A model copied deeply, and quickly: trials copy one again and again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None), type, type(Ellipsis)))
STATE = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs_ex__")
_PLAIN = frozenset(vars(nn.Module())) - {"_buffers"}  # what every module has

Memo = dict[int, Any]
"""id of an object → its copy, as `copy.deepcopy` keeps it."""


def deep_copy(model: nn.Module, instead: Mapping[int, object]) -> nn.Module:
    """A deep copy in the same modes, with `instead` in place of objects, given by their id.

    Tensors that a forward left behind (`self.kept = x`, or the weight that `weight_norm` computed)
    may hang on the graph of that forward, which cannot be copied: their values are.
    """
    memo = {id(x): x.detach().clone() for x in _left_behind(model)} | dict(instead)
    twin: nn.Module = copied(model, memo)
    # Some networks forget theirs, such as graphs of torch.fx with a graph for each mode.
    set_modes(twin, {name: module.training for name, module in model.named_modules()})
    return twin


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Give every submodule its own mode, by name."""
    if model.training != modes.get("", model.training):
        model.train(modes[""])  # called, for some networks change more than flags with it
    for name, module in model.named_modules():
        if module.training != modes.get(name, module.training):
            module.training = modes[name]


def copied(value: Any, memo: Memo) -> Any:
    """`copy.deepcopy(value, memo)`, without its way through pickling for ordinary modules."""
    if type(value) in ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    twin: Any
    if type(value) is tuple and all(type(item) in ATOMS for item in value):
        return value
    if type(value) is set and all(type(item) in ATOMS for item in value):
        memo[id(value)] = twin = set(value)
        return twin
    if type(value) in (dict, OrderedDict):
        memo[id(value)] = twin = type(value)()
        for key, item in value.items():
            key = key if type(key) in ATOMS else copied(key, memo)
            twin[key] = item if type(item) in ATOMS else copied(item, memo)
        return twin
    if isinstance(value, nn.Module) and is_ordinary(type(value)):  # type: ignore[arg-type]
        memo[id(value)] = twin = object.__new__(type(value))
        own = twin.__dict__
        for key, item in value.__dict__.items():
            kind = type(item)
            if kind in ATOMS:
                own[key] = item
            elif kind in (dict, OrderedDict) and not item and id(item) not in memo:
                memo[id(item)] = own[key] = kind()  # room for hooks, of which a module has a dozen
            elif key != "_compiled_call_impl":  # torch leaves it behind, too
                own[key] = copied(item, memo)
        return twin
    return copy.deepcopy(value, memo)


@cache
def is_ordinary(kind: type[nn.Module]) -> bool:
    """Whether copies of a class are its attributes' copies, and nothing else is done to them."""
    if kind.__new__ is not object.__new__ or any(k.__dict__.get("__slots__") for k in kind.__mro__):
        return False
    if any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in STATE):
        return False
    # torch's own only fill in what files of old versions lack; its compiler puts another on all.
    own = str(kind.__setstate__.__module__).startswith("torch.nn.modules.")
    return own or kind.__setstate__ is nn.Module.__setstate__


def _left_behind(model: nn.Module) -> list[Tensor]:
    """Tensors kept by modules that were computed with gradients."""
    found: list[Tensor] = []
    seen: set[int] = set()  # a list may hold itself
    waiting: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) not in ATOMS and name not in _PLAIN:
                waiting.append(value)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if not value.is_leaf:
                found.append(value)
        elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return found
