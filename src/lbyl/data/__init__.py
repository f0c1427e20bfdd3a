"""Labelled images for measuring: `load` opens the usual layouts, `accuracy` gives top-1."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lbyl.data.imageset import ImageSet
    from lbyl.data.measure import accuracy, evaluate
    from lbyl.data.reader import load

__all__ = ["ImageSet", "accuracy", "evaluate", "load"]

_MODULES = {"ImageSet": "imageset", "accuracy": "measure", "evaluate": "measure", "load": "reader"}


def __getattr__(name: str) -> Any:  # imported on first use, so that importing lbyl stays quick
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
