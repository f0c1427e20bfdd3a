"""Networks by name, with what their inputs look like: the one that ships, and those registered."""

from lbyl.app.sources.zoo.digits import DigitsNet
from lbyl.app.sources.zoo.registry import NetworkInfo, create, info, names, register
from lbyl.app.sources.zoo.weights import load_weights

__all__ = [
    "DigitsNet",
    "NetworkInfo",
    "create",
    "info",
    "load_weights",
    "names",
    "register",
]
