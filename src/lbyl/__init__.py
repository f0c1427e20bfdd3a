"""Make a pretrained network smaller without its data and without training it."""

from lbyl import images
from lbyl.compress import compress
from lbyl.criteria import criteria
from lbyl.elimination import EchoCriterion
from lbyl.estimate import Estimate, estimate
from lbyl.exceptions import LbylError
from lbyl.io import load, save
from lbyl.leaves import declare
from lbyl.plan import Plan
from lbyl.restore import (
    LBYL,
    AnalyticMoments,
    Coreset,
    Echo,
    Fold,
    NeuronMerging,
    OneToOne,
    Prune,
    methods,
)
from lbyl.result import Result
from lbyl.statistics import Statistics, collect
from lbyl.trace import trace
from lbyl.unit import Graph, Unit

__version__ = "0.1.0"

__all__ = [
    "LBYL",
    "AnalyticMoments",
    "Coreset",
    "Echo",
    "EchoCriterion",
    "Estimate",
    "Fold",
    "Graph",
    "LbylError",
    "NeuronMerging",
    "OneToOne",
    "Plan",
    "Prune",
    "Result",
    "Statistics",
    "Unit",
    "collect",
    "compress",
    "criteria",
    "declare",
    "estimate",
    "images",
    "load",
    "methods",
    "save",
    "trace",
]
