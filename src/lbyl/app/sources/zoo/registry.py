"""Networks by name: a factory together with what its inputs must look like.

A name says both architecture and data set, because normalisation and class count belong to the
pair. A new network is one decorated factory; nothing else has to be told about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from lbyl.app.sources.zoo.weights import load_weights
from lbyl.errors import LbylError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Factory = Callable[[], nn.Module]


@dataclass(frozen=True)
class NetworkInfo:
    """What must be known to feed a network: plain data, printable."""

    name: str
    input_shape: tuple[int, ...]  # (C, H, W), or (features,) for a network of linear layers only
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    dataset: str
    weights: str  # the usual file name of the trained weights

    @property
    def flatten(self) -> bool:
        """Whether the network reads each image as one vector."""
        return len(self.input_shape) == 1


_NETWORKS: dict[str, tuple[NetworkInfo, Factory]] = {}
_SHIPPED: dict[str, Path] = {}


def register(info: NetworkInfo, shipped: Path | None = None) -> Callable[[Factory], Factory]:
    """Put the decorated factory in the registry; ``shipped`` is a weights file in the package."""

    def keep(factory: Factory) -> Factory:
        if info.name in _NETWORKS:
            raise LbylError(f"a network named {info.name!r} is already registered")
        _NETWORKS[info.name] = (info, factory)
        if shipped is not None:
            _SHIPPED[info.name] = shipped
        return factory

    return keep


def names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_NETWORKS)


def info(name: str) -> NetworkInfo:
    """Input shape, normalisation, classes and weights file name of a registered network."""
    return _find(name)[0]


def create(name: str, weights: str | Path | None = None) -> nn.Module:
    """Build a registered network in evaluation mode.

    ``weights`` is the path of a state dict (see :func:`load_weights`), or the word ``"shipped"``
    for a network whose trained weights come with the package. Without it the network is untrained.
    """
    path = _shipped(name) if weights == "shipped" else weights
    model = _find(name)[1]()
    if path is not None:
        load_weights(model, path)
    return model.eval()


def _find(name: str) -> tuple[NetworkInfo, Factory]:
    if name not in _NETWORKS:
        raise LbylError(f"no network named {name!r}; there are: {', '.join(names())}")
    return _NETWORKS[name]


def _shipped(name: str) -> Path:
    _find(name)
    if name not in _SHIPPED:
        having = ", ".join(sorted(_SHIPPED))
        raise LbylError(f"no weights are shipped for {name!r} (only for: {having}); give a path")
    return _SHIPPED[name]
