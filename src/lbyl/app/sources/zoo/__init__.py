"""The paper's small networks and the demonstration network, by name."""

from lbyl.app.sources.zoo import imagenet
from lbyl.app.sources.zoo.digits import DigitsNet
from lbyl.app.sources.zoo.efficientnet import EfficientNetLite0
from lbyl.app.sources.zoo.lenet import LeNet300100
from lbyl.app.sources.zoo.registry import NetworkInfo, create, info, names, register
from lbyl.app.sources.zoo.resnet import ResNet20, ResNet50, ResNet56
from lbyl.app.sources.zoo.vgg import VGG16
from lbyl.app.sources.zoo.weights import load_weights

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
