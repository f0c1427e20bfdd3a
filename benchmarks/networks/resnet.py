"""Residual networks for 32-pixel images: the thin ResNet-20/56 and the wide ResNet-50."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbyl.app.sources.zoo.registry import IMAGENET_MEAN, IMAGENET_STD, NetworkInfo, register


class PaddedShortcut(nn.Module):
    """A shortcut without parameters: every second pixel, and zero channels on both sides."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around an identity, or around a padded shortcut where shapes change."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        changes = stride != 1 or width != out
        self.shortcut = PaddedShortcut(out // 4) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 (carrying the stride) and 1×1 convolutions, four times as wide at the end."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.conv1 = nn.Conv2d(width, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or width != out:
            projection = nn.Conv2d(width, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


class ThinResNet(nn.Module):
    """He's CIFAR network: 16, 32, 64 channels in three stages of ``blocks`` basic blocks each."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _basic_stage(16, 16, blocks, stride=1)
        self.layer2 = _basic_stage(16, 32, blocks, stride=2)
        self.layer3 = _basic_stage(32, 64, blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


class ResNet20(ThinResNet):
    """Three blocks a stage."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(3, classes)


class ResNet56(ThinResNet):
    """Nine blocks a stage."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(9, classes)


class ResNet50(nn.Module):
    """ImageNet's stages of 3, 4, 6, 3 bottlenecks behind a stem that keeps 32 pixels."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _bottleneck_stage(64, 64, 3, stride=1)
        self.layer2 = _bottleneck_stage(256, 128, 4, stride=2)
        self.layer3 = _bottleneck_stage(512, 256, 6, stride=2)
        self.layer4 = _bottleneck_stage(1024, 512, 3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def _basic_stage(width: int, out: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (BasicBlock(out, out, 1) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(width, out, stride), *rest)


def _bottleneck_stage(width: int, inner: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (Bottleneck(4 * inner, inner, 1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(width, inner, stride), *rest)


def _thin(name: str) -> NetworkInfo:
    # Both were trained with ImageNet's normalisation, though the images are CIFAR's.
    return NetworkInfo(
        name=name,
        input_shape=(3, 32, 32),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        classes=10,
        dataset="CIFAR-10",
        weights=f"{name}.safetensors",
    )


@register(_thin("resnet20_cifar10"))
def resnet20_cifar10() -> nn.Module:
    return ResNet20()


@register(_thin("resnet56_cifar10"))
def resnet56_cifar10() -> nn.Module:
    return ResNet56()


@register(
    NetworkInfo(
        name="resnet50_cifar100",
        input_shape=(3, 32, 32),
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
        classes=100,
        dataset="CIFAR-100",
        weights="resnet50_cifar100.safetensors",
    )
)
def resnet50_cifar100() -> nn.Module:
    return ResNet50()
