"""The networks of the paper, by name: importing this registers them beside the digits.

On the command line each is a factory here: `lbyl inspect benchmarks.networks:vgg16_cifar10`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.networks import imagenet as imagenet
from benchmarks.networks.efficientnet import EfficientNetLite0
from benchmarks.networks.lenet import LeNet300100
from benchmarks.networks.resnet import ResNet20, ResNet50, ResNet56
from benchmarks.networks.vgg import VGG16
from lbyl.app.sources import zoo

__all__ = ["VGG16", "EfficientNetLite0", "LeNet300100", "ResNet20", "ResNet50", "ResNet56"]


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    if name not in zoo.names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: (zoo.create(name), torch.zeros(1, *zoo.info(name).input_shape))
