"""Recurrent layers, which keep weak references to their weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl


class Recurrent(nn.Module):
    """Two layers, and a recurrent one between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 8)
        self.inner = getattr(nn, kind)(8, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.b(self.a(x).relu()))[0])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_network_with_a_recurrent_layer_is_pruned(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(kind).eval(), torch.randn(2, 4, 6)
    result = lbyl.compress(model, x, 0.5)
    assert len(result.plan.kept["a"]) == 8
    assert result.model(x).shape == (2, 4, 3)
