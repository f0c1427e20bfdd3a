"""Methods of restoration, one file each; importing this registers them all.

To add one: a frozen dataclass derived from `Method` with `deliver`, decorated with
`@lbyl.methods.register("name")`. `lbyl.methods.check(MyMethod())` runs the checks that every
method has to pass.
"""

import importlib

from lbyl.methods.base import Delivery, Method, registry
from lbyl.methods.echo import Echo
from lbyl.methods.lbyl import LBYL
from lbyl.methods.none import Prune
from lbyl.rivals.coreset import Coreset
from lbyl.rivals.fold import Fold
from lbyl.rivals.moments import AnalyticMoments
from lbyl.rivals.neuron_merging import NeuronMerging
from lbyl.rivals.one_to_one import OneToOne

register = registry.register
names = registry.names
resolve = registry.resolve


def check(method: str | Method) -> None:
    """Run the checks that every method has to pass; the first that fails is an `LbylError`."""
    importlib.import_module("lbyl.checks").check_method(method)


__all__ = [
    "LBYL",
    "AnalyticMoments",
    "Coreset",
    "Delivery",
    "Echo",
    "Fold",
    "Method",
    "NeuronMerging",
    "OneToOne",
    "Prune",
    "check",
    "names",
    "register",
    "registry",
    "resolve",
]
