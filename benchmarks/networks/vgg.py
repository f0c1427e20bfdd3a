"""VGG-16 for 32-pixel images: thirteen 3×3 convolutions in a chain, each with BatchNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lbyl.app.sources.zoo.registry import NetworkInfo, register

# Output channels of the convolutions of each stage; the resolution halves between stages.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """The CIFAR variant: one hidden linear layer with BatchNorm instead of ImageNet's two."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = _features()
        self.avgpool = nn.AvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))  # type: ignore[no-any-return]


def _features() -> nn.Sequential:
    layers: list[nn.Module] = []
    width = 3
    for stage in STAGES:
        if layers:
            layers.append(nn.MaxPool2d(2))
        for out in stage:
            conv = nn.Conv2d(width, out, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.ReLU()]
            width = out
    return nn.Sequential(*layers)


@register(
    NetworkInfo(
        name="vgg16_cifar10",
        input_shape=(3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        classes=10,
        dataset="CIFAR-10",
        weights="vgg16_cifar10.safetensors",
    )
)
def vgg16_cifar10() -> nn.Module:
    return VGG16()
