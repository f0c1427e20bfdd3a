"""torchvision's networks for ImageNet that the paper prunes, under the names of its tables."""

from __future__ import annotations

from torch import nn

from lbyl.app.sources.zoo.registry import IMAGENET_MEAN, IMAGENET_STD, NetworkInfo, register
from lbyl.errors import LbylError

TORCHVISION = {
    "mobilenet_v2_imagenet": "mobilenet_v2",
    "resnet34_imagenet": "resnet34",
    "resnet101_imagenet": "resnet101",
}


def _register(name: str, function: str) -> None:
    def build() -> nn.Module:
        try:
            from torchvision import models
        except ImportError as error:
            raise LbylError(f"{name} needs torchvision: pip install lbyl[vision]") from error
        model: nn.Module = getattr(models, function)(weights=None)
        return model

    register(
        NetworkInfo(
            name=name,
            input_shape=(3, 224, 224),
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            classes=1000,
            dataset="ImageNet",
            weights=f"{name}.safetensors",
        )
    )(build)


for _name, _function in TORCHVISION.items():
    _register(_name, _function)
