"""Slim attention computes what torch's own does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl

MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "boolean": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "added": {"attn_mask": torch.linspace(-2, 1, 25).reshape(5, 5).double()},
    "by head": {"attn_mask": torch.linspace(-2, 1, 150).reshape(6, 5, 5).double()},
    "padding": {"key_padding_mask": torch.tensor([[False] * 4 + [True], [False] * 5])},
}


class Masked(nn.Module):
    """Gives the attention's output and its weights."""

    def __init__(self, given: dict[str, Tensor], weights: bool) -> None:
        super().__init__()
        self.given, self.weights = given, weights
        self.attention = nn.MultiheadAttention(12, 3)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=self.weights, **self.given)


@torch.no_grad()
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_channels_of_heads_that_carry_nothing_go_without_a_trace(
    mask: str, weights: bool, batched: bool
) -> None:
    given = dict(MASKS[mask])
    if not batched and mask in ("padding", "by head"):
        given = {name: x[:3] if mask == "by head" else x[0] for name, x in given.items()}
    model = Masked(given, weights).double().eval()
    for part, silent in ((0, 1), (2, 3)):  # queries, then values: one channel of every head
        rows = slice(12 * part + silent, 12 * part + 12, 4)
        model.attention.in_proj_weight[rows] = 0
        model.attention.in_proj_bias[rows] = 0
    x = torch.randn(5, 2, 12).double() if batched else torch.randn(5, 12).double()
    heads = torch.arange(12).view(3, 4)
    kept = {"attention:qk": heads[:, [0, 2, 3]].flatten(), "attention:v": heads[:, :3].flatten()}
    plan = lbyl.Plan(kept, dict.fromkeys(kept, 12))
    slim = lbyl.compress(model, x, plan, include=["*:qk", "*:v"], method="none").model
    assert slim.get_parameter("attention.in_proj_weight").shape == (27, 12)
    for found, wanted in zip(slim(x), model(x), strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or torch.allclose(found, wanted, atol=1e-12)
