"""Methods of restoration, one file each; importing this registers them all."""

from lbyl.restore.base import Delivery, Method, Reading, methods
from lbyl.restore.coreset import Coreset
from lbyl.restore.echo import Echo
from lbyl.restore.fold import Fold
from lbyl.restore.lbyl import LBYL
from lbyl.restore.moments import AnalyticMoments
from lbyl.restore.neuron_merging import NeuronMerging
from lbyl.restore.none import Prune
from lbyl.restore.one_to_one import OneToOne

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
    "Reading",
    "methods",
]
