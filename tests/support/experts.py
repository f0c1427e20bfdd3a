"""Experts of a mixture in two tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, NEURONS = 3, 8


class Experts(nn.Module):
    """All experts in two tensors, as Transformers have them; those that a token is sent to run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.intermediate_dim = NEURONS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * NEURONS, width))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, width, NEURONS))
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for i in range(EXPERTS):
            token, place = torch.where(index == i)
            gate, up = F.linear(hidden[token], self.gate_up_proj[i]).chunk(2, dim=-1)
            found = F.linear(self.act_fn(gate) * up, self.down_proj[i])
            out = out.index_add(0, token, found * weights[token, place, None])
        return out
