"""MobileNetV2 for ImageNet: torchvision's own network under a registered name."""

from __future__ import annotations

from torch import nn

from lbyl.exceptions import LbylError
from lbyl.zoo.registry import IMAGENET_MEAN, IMAGENET_STD, NetworkInfo, register


@register(
    NetworkInfo(
        name="mobilenet_v2_imagenet",
        input_shape=(3, 224, 224),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        classes=1000,
        dataset="ImageNet",
        weights="mobilenet_v2_imagenet.safetensors",
    )
)
def mobilenet_v2_imagenet() -> nn.Module:
    try:
        from torchvision.models import mobilenet_v2
    except ImportError as error:
        raise LbylError("mobilenet_v2_imagenet needs torchvision: pip install lbyl[vision]") from (
            error
        )
    model: nn.Module = mobilenet_v2(weights=None)
    return model
