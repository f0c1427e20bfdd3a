"""Methods that choose channels themselves also meet units that no layer reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl


class Attention(nn.Module):
    """Self-attention between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.out(y))


@pytest.mark.parametrize("method", ["coreset", "fold"])
def test_queries_and_keys_are_chosen_by_their_size(method: str) -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 5, 6)
    plans = [
        lbyl.compress(model, x, {"*:qk": 0.5}, include="*:qk", method=m).plan
        for m in (method, "none")
    ]
    (name,) = plans[0].pruned
    assert torch.equal(plans[0].kept[name], plans[1].kept[name])
    assert len(plans[0].kept[name]) == 6
