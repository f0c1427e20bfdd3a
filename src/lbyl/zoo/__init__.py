"""The paper's small networks and the demonstration network, by name."""

from lbyl.zoo import imagenet as imagenet  # imported so that its networks register themselves
from lbyl.zoo.digits import DigitsNet
from lbyl.zoo.lenet import LeNet300100
from lbyl.zoo.registry import NetworkInfo, create, info, names, register
from lbyl.zoo.resnet import ResNet20, ResNet50, ResNet56
from lbyl.zoo.vgg import VGG16
from lbyl.zoo.weights import load_weights

__all__ = [
    "VGG16",
    "DigitsNet",
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
