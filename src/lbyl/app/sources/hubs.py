"""Networks by name: torchvision's, timm's and those of the zoo."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from lbyl.app.sources import zoo
from lbyl.app.sources.base import (
    DEFAULT_SIZE,
    downloading,
    image_network,
    imported,
    register,
    unknown,
)
from lbyl.app.sources.network import Network
from lbyl.app.sources.zoo.registry import IMAGENET_MEAN, IMAGENET_STD
from lbyl.errors import LbylError


@register(
    "torchvision",
    "torchvision:NAME",
    names=lambda: imported("torchvision.models", "vision").list_models(),
    from_plan=True,
)
def from_torchvision(name: str, word: str | None, classes: int | None) -> Network:
    models = imported("torchvision.models", "vision")
    if name not in models.list_models():
        raise unknown(f"torchvision:{name}", models.list_models())
    known = models.get_model_weights(name)
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if word is not None:
        if word not in (*known.__members__, "DEFAULT"):
            listed = ", ".join(known.__members__) or "none"
            raise LbylError(f"{name} has no weights {word!r}; it has {listed}, or give a file")
        options["weights"] = known[word]
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # nothing is fetched that was not asked for
    model = downloading(lambda: models.get_model(name, **options), f"torchvision:{name}")
    entry = known[word or "DEFAULT"] if len(known) else None
    transforms = entry.transforms() if entry is not None else None
    size = getattr(transforms, "crop_size", [DEFAULT_SIZE])[0]
    mean = getattr(transforms, "mean", IMAGENET_MEAN)
    std = getattr(transforms, "std", IMAGENET_STD)
    network = image_network(model, size, mean, std, word)
    if models.get_model_builder(name).__module__.startswith("torchvision.models.detection"):
        network = replace(network, example=([network.example[0]],))  # a list of images
    return network


@register(
    "timm",
    "timm:NAME",
    names=lambda: imported("timm", "vision").list_models(),
    from_plan=True,
)
def from_timm(name: str, word: str | None, classes: int | None) -> Network:
    timm = imported("timm", "vision")
    if word not in (None, "pretrained"):
        raise LbylError(f"timm's weights are a file or the word 'pretrained', not {word!r}")
    if name.split(".")[0] not in timm.list_models():
        raise unknown(f"timm:{name}", timm.list_models())
    options = {} if classes is None else {"num_classes": classes}
    model = downloading(
        lambda: timm.create_model(name, pretrained=word is not None, **options), f"timm:{name}"
    )
    config = timm.data.resolve_model_data_config(model)
    shape = tuple(config["input_size"])
    return Network(
        "", model, torch.zeros(1, *shape), shape, tuple(config["mean"]), tuple(config["std"]), word
    )


@register("lbyl", "lbyl:NAME", names=zoo.names, from_plan=True)
def from_zoo(name: str, word: str | None, classes: int | None) -> Network:
    if word not in (None, "shipped"):
        raise LbylError(f"weights of the zoo are a file or the word 'shipped', not {word!r}")
    if classes is not None:
        raise LbylError(f"lbyl:{name} has its number of classes already; leave --classes out")
    info = zoo.info(name)
    model = zoo.create(name, word)
    example = torch.zeros(1, *info.input_shape)
    return Network("", model, example, info.input_shape, info.mean, info.std, word)
