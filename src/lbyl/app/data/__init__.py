"""Labelled images for measuring: `load` opens the usual layouts, `accuracy` gives top-1."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lbyl.app.data.imageset import ImageSet
    from lbyl.app.data.measure import Score, accuracy, evaluate, score
    from lbyl.app.data.reader import load

__all__ = ["ImageSet", "Score", "accuracy", "evaluate", "load", "score"]

_MODULES = {
    "ImageSet": "imageset",
    "load": "reader",
    **dict.fromkeys(("Score", "accuracy", "evaluate", "score"), "measure"),
}


def __getattr__(name: str) -> Any:  # imported on first use, so that importing lbyl stays quick
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
