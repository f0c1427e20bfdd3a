"""Published architectures in small: the same classes, few blocks, narrow layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from support.published import Build


def vit() -> tuple[nn.Module, Any]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)
    return model, torch.randn(2, 3, 32, 32)


def swin() -> tuple[nn.Module, Any]:
    from torchvision.models import SwinTransformer

    sizes: dict[str, Any] = {"depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return SwinTransformer([2, 2], 16, **sizes, num_classes=10), torch.randn(1, 3, 32, 32)


def densenet() -> tuple[nn.Module, Any]:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2, 2), 16, num_classes=10), torch.randn(2, 3, 64, 64)


def convnext() -> tuple[nn.Module, Any]:
    from timm.models.convnext import ConvNeXt

    model = ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=9)
    return model, torch.randn(2, 3, 32, 32)


def resnet() -> tuple[nn.Module, Any]:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [2, 2, 1, 1], num_classes=10), torch.randn(2, 3, 32, 32)


def mobilenet_v3(last: int = 48) -> Any:
    from torchvision.models import MobileNetV3
    from torchvision.models.mobilenetv3 import InvertedResidualConfig

    block = partial(InvertedResidualConfig, width_mult=1.0)
    rows = [
        block(16, 3, 16, 16, False, "RE", 2, 1),
        block(16, 3, 24, 16, False, "RE", 1, 1),
        block(16, 5, 32, 24, True, "HS", 2, 1),
        block(24, 5, 48, 24, True, "HS", 1, 1),
        block(24, 5, 64, 32, True, "HS", 2, 1),
        block(32, 5, 64, 32, True, "HS", 1, 1),
    ]
    return MobileNetV3(rows, last, num_classes=10)


def mobilenet() -> tuple[nn.Module, Any]:
    return mobilenet_v3(), torch.randn(2, 3, 32, 32)


def shufflenet() -> tuple[nn.Module, Any]:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 1], [8, 16, 32, 64, 48], num_classes=10), torch.randn(2, 3, 64, 64)


def efficientnet() -> tuple[nn.Module, Any]:
    from torchvision.models import EfficientNet
    from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig

    rows = [
        FusedMBConvConfig(2, 3, 1, 8, 16, 2),
        MBConvConfig(1, 3, 1, 16, 8, 1),
        MBConvConfig(4, 5, 2, 8, 16, 2),
    ]
    return EfficientNet(rows, 0.2, num_classes=10), torch.randn(2, 3, 32, 32)


def regnet() -> tuple[nn.Module, Any]:
    from torchvision.models import RegNet
    from torchvision.models.regnet import BlockParams

    sizes = BlockParams.from_init_params(
        depth=5, w_0=16, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return RegNet(sizes, num_classes=10, stem_width=16), torch.randn(2, 3, 64, 64)


class Inceptions(nn.Module):
    """GoogLeNet's blocks: four branches each, side by side."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.googlenet import BasicConv2d, Inception

        self.stem = BasicConv2d(3, 16, kernel_size=3, padding=1)
        self.first = Inception(16, 8, 6, 12, 4, 8, 6)
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.second = Inception(34, 12, 8, 16, 4, 10, 8)
        self.head = nn.Linear(46, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.pool(self.first(self.stem(x))))
        return self.head(x.mean((2, 3)))


def inception() -> tuple[nn.Module, Any]:
    return Inceptions(), torch.randn(2, 3, 16, 16)


def lraspp() -> tuple[nn.Module, Any]:
    from torchvision.models.segmentation.lraspp import _lraspp_mobilenetv3

    return _lraspp_mobilenetv3(mobilenet_v3(), 5), torch.randn(1, 3, 64, 64)


def ssdlite() -> tuple[nn.Module, Any]:
    """A detector: it takes a list of images and gives a list of boxes."""
    from torchvision.models.detection import _utils
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
    from torchvision.models.detection.ssd import SSD
    from torchvision.models.detection.ssdlite import SSDLiteHead, _mobilenet_extractor

    norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.03)
    backbone = _mobilenet_extractor(mobilenet_v3(), 2, norm)
    anchors = DefaultBoxGenerator([[2, 3] for _ in range(6)], min_ratio=0.2, max_ratio=0.95)
    widths = _utils.retrieve_out_channels(backbone, (64, 64))
    head = SSDLiteHead(widths, anchors.num_anchors_per_location(), 5, norm)
    few: dict[str, Any] = {"score_thresh": 0.5, "topk_candidates": 10, "detections_per_img": 5}
    model = SSD(backbone, anchors, (64, 64), 5, head=head, **few)
    return model, ([torch.rand(3, 64, 64)],)


NETWORKS: dict[str, Build] = {
    "vit": vit,
    "swin": swin,
    "densenet": densenet,
    "convnext": convnext,
    "resnet": resnet,
    "mobilenet": mobilenet,
    "shufflenet": shufflenet,
    "efficientnet": efficientnet,
    "regnet": regnet,
    "inception": inception,
    "lraspp": lraspp,
    "ssdlite": ssdlite,
}
