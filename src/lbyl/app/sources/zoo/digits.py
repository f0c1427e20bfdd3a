"""The demonstration: a small network for scikit-learn's 8×8 digits, with weights in the package.

It has one of each thing the library treats (a plain chain, a pooling layer, a residual addition)
and more filters than the task needs, so half of them can go; yet it was trained without any
sparsity, so taking them away unrepaired ruins it. ``scripts/train_demo.py`` made the weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbyl.app.sources.zoo.registry import NetworkInfo, register

SHIPPED = Path(__file__).with_name("digits.safetensors")


class DigitsNet(nn.Module):
    """Stem, two plain convolutions, one residual block, average pooling, linear."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = _conv_bn_relu(1, 32)
        self.plain1 = _conv_bn_relu(32, 48)
        self.plain2 = _conv_bn_relu(48, 64)
        self.pool = nn.MaxPool2d(2)
        self.block = ResidualBlock(64)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain2(self.plain1(self.stem(x)))
        x = self.block(self.pool(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions around the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


def _conv_bn_relu(width: int, out: int) -> nn.Sequential:
    conv = nn.Conv2d(width, out, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())


@register(
    NetworkInfo(
        name="digits",
        input_shape=(1, 8, 8),
        mean=(0.305,),
        std=(0.376,),
        classes=10,
        dataset="digits",
        weights=SHIPPED.name,
    ),
    shipped=SHIPPED,
)
def digits() -> nn.Module:
    return DigitsNet()
