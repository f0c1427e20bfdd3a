"""LeNet-300-100: three linear layers, the paper's network without BatchNorm."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lbyl.app.sources.zoo.registry import NetworkInfo, register


class LeNet300100(nn.Module):
    """784 → 300 → 100 → classes with ReLU between; reads flattened images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.ip1 = nn.Linear(784, 300)
        self.ip2 = nn.Linear(300, 100)
        self.ip3 = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.ip1(x))
        x = F.relu(self.ip2(x))
        return self.ip3(x)  # type: ignore[no-any-return]


@register(
    NetworkInfo(
        name="lenet300_100_fashionmnist",
        input_shape=(784,),
        mean=(0.5,),
        std=(0.5,),
        classes=10,
        dataset="FashionMNIST",
        weights="lenet300_100_fashionmnist.safetensors",
    )
)
def lenet300_100_fashionmnist() -> nn.Module:
    return LeNet300100()
