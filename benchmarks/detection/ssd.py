"""An SSD detector on a ResNet with BatchNorm.

The backbone is a plain network from an image to a few feature maps, so that it can be traced and
made smaller by itself; what depends on the data (matching, sorting, suppression) is torchvision's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.runtime.run import device_of, evaluation_mode

BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
BOTTLENECK = 50  # from this depth on blocks are bottlenecks, four times as wide outside
# Sides of the default boxes as fractions of the image's, one a feature map and one beyond.
SCALES = (0.10, 0.20, 0.38, 0.58, 0.80, 1.0)
ASPECT_RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,))


class ResNetFeatures(nn.Module):
    """Five feature maps, each half the one before: three of a ResNet and two of added layers.

    ``fine=True`` keeps the stem at stride 2, giving maps from stride 4 on: small images need it.
    Stages are named as torchvision's ResNets name theirs, so that their weights fit.
    """

    def __init__(self, depth: int = 18, width: int = 64, *, fine: bool = True) -> None:
        super().__init__()
        from torchvision.models.resnet import BasicBlock, Bottleneck

        block = Bottleneck if depth >= BOTTLENECK else BasicBlock
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if fine else nn.MaxPool2d(3, stride=2, padding=1)
        inner = [width * 2**stage for stage in range(4)]
        before = width
        for stage, (channels, blocks) in enumerate(zip(inner, BLOCKS[depth])):
            layer = _stage(block, before, channels, blocks, stride=1 if stage == 0 else 2)
            self.add_module(f"layer{stage + 1}", layer)
            before = channels * block.expansion
        outer = [channels * block.expansion for channels in inner]
        self.extra1 = _halve(outer[3], inner[1], inner[2])
        self.extra2 = _halve(inner[2], inner[0], inner[2])
        self.out_channels = [outer[1], outer[2], outer[3], inner[2], inner[2]]
        _initialise(self)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(N, 3, H, W) to maps named "0" to "4", the finest first."""
        stem = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        first = self.get_submodule("layer2")(self.get_submodule("layer1")(stem))
        second = self.get_submodule("layer3")(first)
        third = self.get_submodule("layer4")(second)
        fourth = self.extra1(third)
        fifth = self.extra2(fourth)
        return {"0": first, "1": second, "2": third, "3": fourth, "4": fifth}


def _stage(block: Any, before: int, channels: int, count: int, stride: int) -> nn.Sequential:
    shortcut = None
    after = channels * block.expansion
    if stride != 1 or before != after:
        shortcut = nn.Sequential(
            nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
        )
    blocks = [block(before, channels, stride, shortcut)]
    blocks += [block(after, channels) for _ in range(count - 1)]
    return nn.Sequential(*blocks)


def _halve(before: int, inner: int, after: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(before, inner, 1, bias=False)
    layers["bn1"] = nn.BatchNorm2d(inner)
    layers["relu1"] = nn.ReLU(inplace=True)
    layers["conv2"] = nn.Conv2d(inner, after, 3, stride=2, padding=1, bias=False)
    layers["bn2"] = nn.BatchNorm2d(after)
    layers["relu2"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)


def _initialise(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def build_ssd(
    num_classes: int,
    size: int = 128,
    *,
    depth: int = 18,
    width: int = 64,
    fine: bool | None = None,
    score_threshold: float = 0.01,
    nms_threshold: float = 0.45,
    detections: int = 100,
) -> nn.Module:
    """torchvision's SSD for ``num_classes`` kinds of object (the background not counted).

    Images of any size are scaled to ``size`` x ``size``. ``depth`` is 10, 18, 34 or 50; ``fine``
    defaults to true below 256 px.
    """
    try:
        from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
        from torchvision.models.detection.ssd import SSD
    except ImportError as error:
        raise LbylError("detection needs torchvision: pip install 'lbyl[vision]'") from error
    if depth not in BLOCKS:
        raise LbylError(f"depth {depth} is none of {tuple(BLOCKS)}")
    if num_classes < 1 or size < 64 or width < 8:
        raise LbylError("an SSD needs a class, images of 64 px or more and a width of 8 or more")
    backbone = ResNetFeatures(depth, width, fine=size < 256 if fine is None else fine)
    anchors = DefaultBoxGenerator([list(r) for r in ASPECT_RATIOS], scales=list(SCALES))
    detector: nn.Module = SSD(
        backbone,
        anchors,
        (size, size),
        num_classes + 1,
        score_thresh=score_threshold,
        nms_thresh=nms_threshold,
        detections_per_img=detections,
    )
    # torchvision's start is large for channels that BatchNorm has brought to one.
    for layer in detector.get_submodule("head").modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.01)
    return detector


@torch.no_grad()
def feature_sizes(model: nn.Module, size: int) -> list[tuple[int, int]]:
    """Height and width of every feature map for a square image."""
    backbone = model.get_submodule("backbone")
    with evaluation_mode(backbone):
        maps = backbone(torch.zeros(1, 3, size, size, device=device_of(backbone)))
    return [(value.shape[-2], value.shape[-1]) for value in maps.values()]
