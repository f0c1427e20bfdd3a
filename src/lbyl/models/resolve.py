"""Networks by name, as the command line names them: where one comes from, and what it takes.

A name is `torchvision:resnet50`, `timm:mobilenetv2_100`, `lbyl:vgg16_cifar10`, `hf:DIRECTORY`,
`path/to/file.py:factory`, `package.module:factory`, or a directory that `lbyl compress` wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from lbyl.errors import LbylError
from lbyl.models.network import WEIGHT_FILES, Network
from lbyl.models.sources import _MAKERS, _from_file, _from_module
from lbyl.models.zoo import load_weights
from lbyl.storage import PLAN, load
from lbyl.torchkit.files import read_json

FORMS = (
    "torchvision:NAME, timm:NAME, lbyl:NAME, hf:DIRECTORY, path/to/file.py:FUNCTION, "
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
    kind, _, rest = name.partition(":")
    maker = _MAKERS.get(kind) if rest else None
    if maker is None and ".py:" in name:
        maker, rest = _from_file, name
    elif maker is None and _is_dotted(kind) and rest.isidentifier():
        maker, rest = _from_module, name
    if maker is None:
        raise LbylError(f"no model is named {name!r}; name one as {FORMS}")
    word = None if weights is None or _is_path(weights) else str(weights)
    network = maker(rest, word, classes)
    if weights is not None and word is None:
        _fill(network.model, Path(weights))
        network = replace(network, weights=str(weights))
    network.model.eval()
    if input_shape is not None and kind != "hf":
        shape = _completed(tuple(input_shape), network.input_shape)
        network = replace(network, input_shape=shape, example=torch.zeros(1, *shape))
    return replace(network, name=name, classes=classes)


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
    known = read_json(path / PLAN).get("network") or {}
    name = str(known.get("name", ""))
    if not name.startswith(("torchvision:", "timm:", "lbyl:")):
        what = f"comes from {name}" if name else "does not say which network it was"
        raise LbylError(
            f"{path} {what}: name the model itself and give --weights {path} (in Python: model=)"
        )
    network = resolve(name, path, known.get("input_shape"), known.get("classes") or classes)
    return replace(network.scaled(known.get("mean"), known.get("std")), name=str(path))
