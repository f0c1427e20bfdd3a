"""The paper's small networks and the demonstration network, by name."""

from lbyl.models.zoo import (
    imagenet as imagenet,  # imported so that its networks register themselves
)
from lbyl.models.zoo.digits import DigitsNet
from lbyl.models.zoo.efficientnet import EfficientNetLite0
from lbyl.models.zoo.lenet import LeNet300100
from lbyl.models.zoo.registry import NetworkInfo, create, info, names, register
from lbyl.models.zoo.resnet import ResNet20, ResNet50, ResNet56
from lbyl.models.zoo.vgg import VGG16
from lbyl.models.zoo.weights import load_weights

__all__ = [
    "VGG16",
    "DigitsNet",
    "EfficientNetLite0",
    "LeNet300100",
    "NetworkInfo",
    "ResNet20",
    "ResNet50",
    "ResNet56",
    "create",
    "info",
    "load_weights",
    "names",
    "register",
]
