"""The baselines beside ours in the table of language models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from benchmarks import transformers as table


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_up, self.mlp_down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp_down(self.mlp_up(x).relu())


def inputs() -> Tensor:
    return torch.randn(500, 4, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.fixture(scope="module")
def prepared() -> lbyl.Prepared:
    x = inputs()
    return table.on_these_texts_alone(lbyl.prepare(Block(), x[:2], include="*", data=x))


def hidden(prepared: lbyl.Prepared) -> Tensor:
    with torch.no_grad():
        up: nn.Module = prepared.model.get_submodule("mlp_up")
        return torch.as_tensor(up(inputs())).relu().double()


def test_scores_follow_the_published_formulas(prepared: lbyl.Prepared) -> None:
    x = hidden(prepared)
    weight = prepared.model.get_parameter("mlp_down.weight").detach().double()
    wanda = (weight.abs() * x.square().mean(0).sqrt()).sum(0)
    flap = x.var(0, correction=0) * weight.square().sum(0)
    for kind, wanted in (("wanda", wanda), ("flap", flap)):
        got = table.neuron_scores(prepared.model, prepared.statistics(), kind)["mlp_down"]
        assert torch.allclose(got, wanted, rtol=1e-4)
        kept = table.selected(prepared, 0.5, kind).kept["mlp_up"]
        assert set(kept.tolist()) == set(wanted.topk(4).indices.tolist())


def test_slicing_keeps_the_leading_axes(prepared: lbyl.Prepared) -> None:
    x, weight = hidden(prepared), prepared.model.get_parameter("mlp_down.weight").double()
    whole = table.sliced(prepared, 0.0).get_parameter("mlp_down.weight").double()
    assert torch.allclose(whole, weight, atol=1e-5)
    half = table.sliced(prepared, 0.5).get_parameter("mlp_down.weight").detach().double()
    axes = torch.linalg.svd(x, full_matrices=False).Vh[:4]
    assert torch.allclose(half, weight @ axes.T @ axes, atol=1e-4)
