"""Methods of restoration, one file each; rivals are imported when they are asked for by name.

To add one: a frozen dataclass derived from `Method` with `deliver`, decorated with
`@lbyl.methods.register("name")`. `lbyl.methods.check(MyMethod())` runs the checks that every
method has to pass.
"""

import importlib
from typing import Any

from lbyl.methods.base import Delivery, Method, registry
from lbyl.methods.echo import Echo
from lbyl.methods.lbyl import LBYL
from lbyl.methods.none import Prune

register = registry.register
names = registry.names
resolve = registry.resolve


def check(method: str | Method) -> None:
    """Run the checks that every method has to pass; the first that fails is an `LbylError`."""
    importlib.import_module("lbyl.checks").check_method(method)


_CLASSES = {
    "AnalyticMoments": "moments",
    "Coreset": "coreset",
    "Fold": "fold",
    "NeuronMerging": "neuron_merging",
    "OneToOne": "one_to_one",
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lbyl.rivals.{_CLASSES[name]}"), name)


__all__ = [
    "LBYL",
    "Delivery",
    "Echo",
    "Method",
    "Prune",
    "check",
    "names",
    "register",
    "registry",
    "resolve",
]
