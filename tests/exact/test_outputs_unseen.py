"""What a network gives need not be a tensor of numbers for a wrong width to be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl

Gives = Callable[[nn.Module, Tensor], Any]


class Slots:
    __slots__ = ("scores",)

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


def keep(net: nn.Module, y: Tensor) -> None:
    net.last = y


GIVES: dict[str, Gives] = {
    "classes": lambda net, y: y.argmax(-1),
    "decisions": lambda net, y: y > 0,
    "a Python number": lambda net, y: float(y.sum()),
    "a list": lambda net, y: y.tolist(),
    "an array": lambda net, y: y.detach().numpy(),
    "an object with slots": lambda net, y: Slots(y),
    "an iterator": lambda net, y: iter([y]),
    "nothing, and keeps it": keep,
    "a sparse tensor": lambda net, y: y.to_sparse(),
}


class Net(nn.Module):
    """Divides by the first layer's width, or by a constant."""

    def __init__(self, gives: Gives, constant: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 32), nn.Linear(32, 10)
        self.gives, self.constant = gives, constant

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).relu()
        h = h / (64 if self.constant else h.shape[-1])
        return self.gives(self, self.c(self.b(h).relu()))


@pytest.mark.parametrize("name", GIVES)
def test_a_width_read_as_a_number_is_found_whatever_is_given(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    assert lbyl.trace(Net(GIVES[name], constant=True).eval(), x).names == ["a", "b"]
    result = lbyl.compress(Net(GIVES[name], constant=False).eval(), x, 0.5)
    assert list(result.plan.pruned) == ["b"]
    assert "network computes with its width" in result.graph.unprunable["a"]
