"""Modules whose channel behaviour is declared by class instead of followed call by call.

What the design must satisfy: a module that torch's function calls do not show (a compiled kernel,
a scripted function) can be described in one line, and what is declared is used by class, so the
network itself is not changed. A declared module is recorded as a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from lbyl.errors import LbylError

Rule = Callable[[Any, Any], Sequence[Tensor]]
"""Ties and pins channels for one recorded call, and gives the labels of what comes out of it.

It is given a `lbyl.tracing.labels.Flow` and a `lbyl.tracing.record.Call`.
"""

_DECLARED: dict[type[nn.Module], str | Rule] = {}
_BY_NAME: dict[str, Rule] = {}
_ATTRIBUTES: dict[type[nn.Module], dict[str, str]] = {}
NAMED = ("channelwise", "opaque")
R = TypeVar("R", bound=Rule)


def declare(
    module: type[nn.Module], behaviour: str | Rule, *, sizes: dict[str, str] | None = None
) -> None:
    """Say what a class of modules does to channels.

    `"channelwise"`: every output channel depends on the same input channel alone (dimension 1, or
    the last where channels lie there), and so do the module's own vectors of that length.
    `"opaque"`: it mixes channels, whatever enters it must stay whole. Or a rule, a function of the
    flow and the recorded call, as in `lbyl.tracing.rules`. `sizes` names attributes that hold a
    number of channels, each with the parameter or buffer whose length it must equal after a cut.
    """
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise LbylError(f"declare needs a class of nn.Module, not {module!r}")
    if not callable(behaviour) and behaviour not in NAMED:
        raise LbylError(f"a behaviour is {' or '.join(map(repr, NAMED))} or a rule: {behaviour!r}")
    _DECLARED[module] = behaviour
    _ATTRIBUTES[module] = dict(sizes or {})


def declare_named(*names: str) -> Callable[[R], R]:
    """The rule of classes known by name, so that their package need not be imported."""

    def register(function: R) -> R:
        for name in names:
            _BY_NAME[name] = function
        return function

    return register


def declared(module: type[nn.Module]) -> str | Rule | None:
    """What was declared of a class, or of the nearest class it derives from."""
    for kind in module.__mro__:
        if kind in _DECLARED:
            return _DECLARED[kind]
        if kind.__name__ in _BY_NAME:
            return _BY_NAME[kind.__name__]
    return None


def is_leaf(module: type[nn.Module]) -> bool:
    """Whether modules of this class are recorded as one call."""
    return declared(module) is not None


def leaf_rule(module: type[nn.Module]) -> Rule | None:
    """The rule of a declared class; None stands for opaque."""
    behaviour = declared(module)
    if behaviour == "channelwise":
        return _BY_NAME["channelwise"]
    return None if isinstance(behaviour, str) else behaviour


def sizes_of(module: type[nn.Module]) -> dict[str, str]:
    """Attributes of a declared class that hold a number of channels → the tensor they follow."""
    for kind in module.__mro__:
        if kind in _ATTRIBUTES:
            return _ATTRIBUTES[kind]
    return {}
