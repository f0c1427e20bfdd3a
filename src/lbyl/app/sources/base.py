"""What a source of networks is, and the list of all of them by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lbyl.app.sources.network import Network
from lbyl.app.sources.zoo.registry import IMAGENET_MEAN, IMAGENET_STD
from lbyl.errors import LbylError
from lbyl.runtime.format import first_line

DEFAULT_SIZE = 224

Maker = Callable[[str, str | None, int | None], Network]
"""(what follows the colon, a word for its weights, number of classes) → the network."""


@dataclass(frozen=True)
class Source:
    """Where networks come from: what is typed before the colon, and how one is made."""

    prefix: str
    form: str  # how a user writes it
    make: Maker
    names: Callable[[], Sequence[str]] = list  # those it knows, for the shell
    # It runs no code that a file brings, so a plan on disk may say that a network is of it.
    from_plan: bool = False
    own_weights: bool = False  # what it makes is trained already, so that nobody is warned
    suffix: str | None = None  # of files that need no prefix


SOURCES: dict[str, Source] = {}
"""By prefix, in the order in which they are listed."""


def register(prefix: str, form: str, **rest: Any) -> Callable[[Maker], Maker]:
    """Put a maker into the list of sources."""

    def add(make: Maker) -> Maker:
        SOURCES[prefix] = Source(prefix, form, make, **rest)
        return make

    return add


def source_of(name: str) -> tuple[Source | None, str]:
    """The source that a model's name is of, and its name there.

    None for a Python file or a directory.
    """
    kind, _, rest = name.partition(":")
    if rest and kind in SOURCES:
        return SOURCES[kind], rest
    by_suffix = (s for s in SOURCES.values() if s.suffix and name.endswith(s.suffix))
    return next(by_suffix, None), name


def image_network(
    model: nn.Module,
    size: int = DEFAULT_SIZE,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    weights: str | None = None,
) -> Network:
    """A network of images; how many channels they have is seen by its first layer."""
    shape = guess_shape(model, size)
    example = torch.zeros(1, *shape)
    return Network("", model, example, shape, tuple(mean), tuple(std), weights)


def guess_shape(model: nn.Module, size: int = DEFAULT_SIZE) -> tuple[int, ...]:
    """Input shape by the first layer with weights: its channels, or its whole width if linear."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return (module.in_channels, size, size)
        if isinstance(module, nn.Linear):
            return (module.in_features,)
    return (3, size, size)


def downloading(make: Callable[[], Any], name: str) -> Any:
    """Run a factory that may fetch weights; without a network there is another way."""
    try:
        return make()
    except (OSError, RuntimeError) as error:
        raise LbylError(
            f"{name} cannot be made: {first_line(error)}; without a connection give a weights file"
        ) from error


def unknown(name: str, known: Sequence[str]) -> LbylError:
    """That a source has no such network, with those whose names are near."""
    source, _, last = name.partition(":")
    near = difflib.get_close_matches(last, known, 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return LbylError(f"{source} has no model {last!r}{hint}")


def imported(module: str, extra: str | None) -> Any:
    """An optional package; one line that says how to get it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        command = f"pip install lbyl[{extra}]" if extra else f"pip install {package}"
        raise LbylError(f"this model needs {package}: {command}") from error
