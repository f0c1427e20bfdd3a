"""Networks by name, as the command line names them: where one comes from, and what it takes.

A name is of a source (`torchvision:resnet50`, `ultralytics:yolo11n.yaml`, `model.onnx`, …; see
`lbyl.app.sources.kinds`), `path/to/file.py:factory`, `package.module:factory`, or a directory
that `lbyl compress` wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lbyl.app.sources.base import Maker
from lbyl.app.sources.kinds import SOURCES, Source, from_file, from_module, source_of
from lbyl.app.sources.network import WEIGHT_FILES, Network
from lbyl.app.sources.zoo import load_weights
from lbyl.errors import LbylError
from lbyl.runtime.files import read_json
from lbyl.runtime.run import Inputs
from lbyl.storage.files import PLAN, checked, load

FORMS = (
    f"{', '.join(source.form for source in SOURCES.values())}, path/to/file.py:FUNCTION, "
    "package.module:FUNCTION or a directory written by lbyl compress"
)


def resolve(
    name: str,
    weights: str | Path | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
) -> Network:
    """Build the network that `name` and `weights` describe, in evaluation mode on the CPU.

    `weights` is a state dict (`.safetensors`, `.pth`, `.pt`), a directory of `lbyl compress`, or
    a word the source knows: torchvision's `IMAGENET1K_V1`, timm's `pretrained`, lbyl's `shipped`.
    """
    if (Path(name) / PLAN).is_file():
        return _from_directory(Path(name), weights, classes)
    make, inner = _maker(name)
    word = None if weights is None or _is_path(weights) else str(weights)
    network = make(inner, word, classes)
    if weights is not None and word is None:
        _fill(network.model, Path(weights))
        network = replace(network, weights=str(weights))
    network.model.eval()
    if input_shape is None and network.unsized:
        raise LbylError(
            f"{name} takes images of any size: say which it is to be compressed for, with "
            "--input-size 320 or 3x320x480 (in Python: input_shape=)"
        )
    if input_shape is not None and not isinstance(network.example, dict):
        shape = _completed(tuple(input_shape), network.input_shape)
        network = replace(network, input_shape=shape, example=_zeros(network.example, shape))
    return replace(network, name=name, classes=classes)


def _maker(name: str) -> tuple[Maker, str]:
    """Who makes the network of a name, and what it calls it."""
    source, inner = source_of(name)
    if source is not None:
        return source.make, inner
    if ".py:" in name:
        return from_file, name
    module, _, function = name.partition(":")
    if _is_dotted(module) and function.isidentifier():
        return from_module, name
    raise LbylError(f"no model is named {name!r}; name one as {FORMS}")


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def parse_input_shape(text: str) -> tuple[int, ...]:
    """`224`, `1x28x28` or `784x` as a shape; a lone number is the side of a square image."""
    parts = text.lower().replace("×", "x").replace(",", "x").split("x")
    try:
        shape = tuple(int(part) for part in parts if part.strip())
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise LbylError(f"input size {text!r}: write 224 for square images, or 3x224x224")
    return shape


def _completed(shape: tuple[int, ...], known: tuple[int, ...]) -> tuple[int, ...]:
    """A lone number is a side for networks of images, and the whole width for others."""
    if len(shape) == 1 and len(known) == 3:
        return (known[0], shape[0], shape[0])
    return shape


def _zeros(example: Inputs, shape: tuple[int, ...]) -> Inputs:
    """An example of another shape, in a list where the network takes its images so."""
    listed = isinstance(example, tuple) and len(example) == 1 and isinstance(example[0], list)
    return ([torch.zeros(shape)],) if listed else torch.zeros(1, *shape)


def _is_path(weights: str | Path) -> bool:
    path = Path(weights)
    return path.suffix in WEIGHT_FILES or path.exists() or len(path.parts) > 1


def _fill(model: nn.Module, path: Path) -> None:
    if path.is_dir():
        load(path, model)
    else:
        load_weights(model, path)


def _from_directory(path: Path, weights: str | Path | None, classes: int | None) -> Network:
    """A compressed network. Its plan says which network it was, but never which code to run."""
    if weights is not None:
        raise LbylError(f"{path} has its weights already; leave --weights out")
    known = _said_network(path)
    name = known.get("name") or ""
    source, inner = source_of(name)
    if source is None or not source.from_plan:
        what = f"comes from {name}" if name else "does not say which network it was"
        raise LbylError(
            f"{path} {what}: name the model itself and give --weights {path} (in Python: model=)"
        )
    classes = known.get("classes") or classes
    _check_belongs(path, source, inner, classes)
    network = resolve(name, path, known.get("input_shape"), classes)
    return replace(network.scaled(known.get("mean"), known.get("std")), name=str(path))


def _said_network(path: Path) -> dict[str, Any]:
    """What plan.json says of the network that it was, checked entry by entry."""
    document = read_json(path / PLAN)
    known = document.get("network") if isinstance(document, dict) else document
    if known is None:
        return {}
    if not isinstance(known, dict):
        raise LbylError(f"'network' in {path / PLAN} must be an object with a name")
    for key, (fits, what) in ENTRIES.items():
        if known.get(key) is not None and not fits(known[key]):
            raise LbylError(f"{key!r} of the network in {path / PLAN} must be {what}")
    return known


def _are_sizes(value: Any) -> bool:
    whole = isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
    return whole and 0 < len(value) <= 4 and math.prod(value) <= LARGEST


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) in (int, float) and abs(x) <= 1e9 for x in value)


LARGEST = 2**26  # numbers in one input
ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str), "a text"),
    "input_shape": (_are_sizes, f"up to four whole numbers, {LARGEST} values at most"),
    "classes": (lambda value: type(value) is int and value > 0, "a whole number"),
    "mean": (_are_numbers, "a list of numbers"),
    "std": (_are_numbers, "a list of numbers"),
}
"""What plan.json says of a network: what each entry must be."""


def _check_belongs(path: Path, source: Source, inner: str, classes: int | None) -> None:
    """That the files are of this network, before memory is taken for it."""
    try:
        with torch.device("meta"):
            made = source.make(inner, None, classes).model
    except Exception:  # not every network can be built without memory
        return
    checked(path, made)
