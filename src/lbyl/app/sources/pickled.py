"""Files of PyTorch as dead data: no class that they name is imported and no code of theirs is run.

`torch.load(weights_only=True)` builds nothing but tensors and plain containers. A network that was
pickled whole names classes besides; each is replaced by an empty one of ours before the file is
read, so that what is left is a tree of attributes, in which the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.runtime.format import first_line

HOLDERS = ("state_dict", "ema", "model")  # under which training scripts keep what they trained
MOST, DEEPEST = 1_000_000, 10_000  # tensors, letters of a name: a file with more is hostile


class Stored:
    """An object of a file: the name of its class, and its attributes."""

    origin = ""  # of the class that was pickled, with its module

    def __new__(cls, *args: Any, **kwargs: Any) -> Stored:
        made = object.__new__(cls)
        made.__dict__["_arguments"] = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def get(self, name: str, otherwise: Any = None) -> Any:
        """An attribute that was stored."""
        return self.__dict__.get(name, otherwise)


def read_pickled(path: Path) -> Any:
    """What a file of `torch.save` holds, with a `Stored` for every object of a class."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many unrelated types for a damaged or unsafe file
        try:
            return _as_dead_data(path)
        except Exception:  # what it is not, is said by the first
            raise LbylError(
                f"{path} is not a plain PyTorch state dict: {first_line(error)}; a file that "
                "holds a whole model runs code when it is read: load it where you trust it, and "
                "save model.state_dict()"
            ) from error


def _as_dead_data(path: Path) -> Any:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)  # of torch 2.6 and later
    classes: list[Any] = [(type("Stored", (Stored,), {"origin": name}), name) for name in names]
    with torch.serialization.safe_globals(classes):
        return torch.load(path, map_location="cpu", weights_only=True)


def find_network(data: Any) -> Stored | None:
    """The network that was pickled whole, on its own or in a checkpoint of training."""
    held = [data, *(data.get(key) for key in HOLDERS)] if isinstance(data, dict) else [data]
    return next((x for x in held if isinstance(x, Stored) and "_modules" in x.__dict__), None)


def state_of(network: Stored) -> dict[str, Tensor]:
    """The state dict that a pickled network would give."""
    return dict(_tensors(network))


def _tensors(network: Stored) -> Iterator[tuple[str, Tensor]]:
    waiting, seen = [("", network)], 0
    while waiting:
        prefix, module = waiting.pop()
        forgotten = _names_in(module.get("_non_persistent_buffers_set"))
        for name, value in [*_table(module, "_parameters"), *_table(module, "_buffers")]:
            seen += 1
            if isinstance(value, Tensor) and name not in forgotten:
                yield prefix + name, value.detach()
        for name, child in _table(module, "_modules"):
            seen += 1
            if isinstance(child, Stored):
                waiting.append((f"{prefix}{name}.", child))
        if seen > MOST or len(prefix) > DEEPEST:
            raise LbylError("the file holds a network without end: it is damaged or hostile")


def _table(module: Stored, name: str) -> list[tuple[str, Any]]:
    table = module.get(name)
    return [(str(key), value) for key, value in table.items()] if isinstance(table, dict) else []


def _names_in(value: Any) -> set[str]:
    """A set of names, also where the file's `set` became a `Stored`."""
    given = value.get("_arguments", ()) if isinstance(value, Stored) else [value]
    return {str(x) for group in given if isinstance(group, (set, list, tuple)) for x in group}
