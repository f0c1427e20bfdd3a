"""Networks of segmentation-models-pytorch: an architecture on an encoder, or what it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lbyl.app.sources.base import image_network, imported, register, unknown
from lbyl.app.sources.network import Network
from lbyl.errors import LbylError
from lbyl.runtime.format import first_line

ENCODER = "resnet34"  # the package's own default


def _architectures() -> list[str]:
    base = imported("segmentation_models_pytorch", "segment")
    return sorted(name.lower() for name in vars(base) if _is_architecture(base, name))


def _is_architecture(package: Any, name: str) -> bool:
    kind = getattr(package, name)
    base = package.base.SegmentationModel
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


@register("smp", "smp:ARCHITECTURE/ENCODER", names=_architectures, from_plan=True)
def from_smp(name: str, word: str | None, classes: int | None) -> Network:
    """`unet/resnet18`, or a directory that `save_pretrained` of the package wrote."""
    package = imported("segmentation_models_pytorch", "segment")
    if (Path(name) / "config.json").is_file():
        return _saved(package, name, word, classes)
    architecture, _, encoder = name.partition("/")
    encoder = encoder or ENCODER
    if word not in (None, "imagenet"):
        raise LbylError(f"weights of smp are a file or its encoder's 'imagenet', not {word!r}")
    if architecture.lower() not in _architectures():
        raise unknown(f"smp:{architecture}", _architectures())
    options = {} if classes is None else {"classes": classes}
    try:
        model = package.create_model(architecture, encoder, word, **options)
    except Exception as error:  # an encoder it does not know is a KeyError, others many types
        raise LbylError(f"smp:{name} cannot be made: {first_line(error)}") from error
    return image_network(model, weights=word)


def _saved(package: Any, name: str, word: str | None, classes: int | None) -> Network:
    if word is not None or classes is not None:
        raise LbylError(f"smp:{name} brings its own weights and classes; leave the options out")
    if not (Path(name) / "model.safetensors").is_file():
        raise LbylError(f"{name} has no model.safetensors: save it again with this version of smp")
    try:
        model: torch.nn.Module = package.from_pretrained(name, local_files_only=True)
    except Exception as error:
        raise LbylError(f"smp cannot load {name}: {first_line(error)}") from error
    return image_network(model, weights=name)
