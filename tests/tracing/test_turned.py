"""Layers that are written as products: `x @ weight.T`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.networks import randomise


class Turned(nn.Linear):
    """A linear layer without `linear`, as Falcon has them."""

    def forward(self, input: Tensor) -> Tensor:
        out = input @ self.weight.T
        return out if self.bias is None else out + self.bias


class Net(nn.Module):
    def __init__(self, kind: type[nn.Linear], bias: bool) -> None:
        super().__init__()
        self.wide, self.narrow = kind(6, 12, bias=bias), kind(12, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_a_turned_weight_is_a_layer(bias: bool) -> None:
    model, plain = Net(Turned, bias), Net(nn.Linear, bias)
    randomise(model)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(40, 3, 6, generator=torch.Generator().manual_seed(0))
    assert lbyl.trace(model, x[:2]).names == ["wide"]
    slim, other = (lbyl.compress(m, x[:2], {"*": 0.5}, data=x) for m in (model, plain))
    assert slim.model.wide.weight.shape == (6, 6)
    assert torch.allclose(slim.model(x), other.model(x), atol=1e-5)


def test_a_turned_weight_that_is_used_otherwise_too_stays_whole() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.wide.weight.T * 2).sum()

    assert not lbyl.trace(randomise(Twice(Turned, True)), torch.randn(2, 6)).names


def test_experts_in_one_tensor_have_a_reason() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 10, 6))
            self.down, self.router = nn.Parameter(torch.randn(3, 6, 10)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.router(x).argmax(-1)
            out = torch.zeros_like(x)
            for i in range(3):
                rows = F.linear(F.linear(x, self.up[i]).relu(), self.down[i])
                out = out + rows * (chosen == i)[:, None]
            return out

    graph = lbyl.trace(Experts(), torch.randn(4, 6))
    assert "mixture of experts" in graph.unprunable["up"]
