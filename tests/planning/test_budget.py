"""Budgets are met, sizes told are sizes measured, and nonsense is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app import data
from lbyl.app.sources import zoo
from support.attention import block
from support.by_hand import plan_of
from support.networks import build, example, randomise


@pytest.fixture(scope="module")
def digits() -> lbyl.Prepared:
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    return lbyl.prepare(zoo.create("digits", "shipped"), x, data=64)


def test_chosen_ratios_beat_uniform_ones_when_little_is_left(digits: lbyl.Prepared) -> None:
    images = data.load("digits")
    chosen = digits.compress(lbyl.Budget(macs=0.25), criterion="echo")
    assert 0.85 * 0.25 < chosen.after.macs / chosen.before.macs <= 0.25
    uniform = digits.compress({"*": 0.7}, criterion="echo")
    right = [data.evaluate("digits", r.model, images) for r in (chosen, uniform)]
    assert uniform.after.macs <= 0.25 * uniform.before.macs * 1.05 and right[0] > right[1]


class Residual(nn.Module):
    """A stem and two blocks whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1), nn.BatchNorm2d(4))
            for _ in range(2)
        )
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.blocks:
            x = x + part(x)
        out: Tensor = self.head(x)
        return out


def test_an_error_counts_by_the_part_of_the_sum_that_it_is_in() -> None:
    """Two equal blocks: whichever is normalised to more of the residual sum keeps more."""
    torch.manual_seed(0)
    model = randomise(Residual(), 1)
    model.blocks[1].load_state_dict(model.blocks[0].state_dict())
    x = torch.randn(64, 3, 4, 4)
    kept = {}
    for gains in ((0.3, 3.0), (3.0, 0.3)):
        with torch.no_grad():
            for part, gain in zip(model.blocks, gains):
                part[3].weight.fill_(gain)
        result = lbyl.compress(model, x, lbyl.Budget(macs=0.6), criterion="echo", data=64)
        kept[gains] = [len(k) for k in result.plan.kept.values()]
    assert kept[0.3, 3.0][0] < kept[0.3, 3.0][1]
    assert kept[3.0, 0.3][0] >= kept[3.0, 0.3][1]


def test_sizes_told_are_those_of_the_network_that_comes_out() -> None:
    """Channels, heads and the channels of each multiply; biases that are made count too."""
    model, x = block("kernel")
    include = ["*:heads", "*:qk", "*:v"]
    graph = lbyl.trace(model, x, include=include)
    kept = {"attention:heads": [0, 2], "attention:qk": [0, 1, 4, 5, 8, 9]}
    for method in ("none", "echo"):
        plan = plan_of(graph, kept)
        result = lbyl.compress(model, x, plan, method=method, include=include)
        slim = result.model.attention
        assert slim.q.weight.shape == (4, 12) and slim.v.weight.shape == (8, 12)
        assert slim.out.weight.shape == (12, 8)
        assert result.after.parameters == sum(p.numel() for p in result.model.parameters())
    for name in ("biased", "chain", "bottleneck"):
        model, x = build(name), example(name)
        result = lbyl.compress(model, x, lbyl.Budget(params=0.5), data=32)
        size, full = (sum(p.numel() for p in m.parameters()) for m in (result.model, model))
        assert result.after.parameters == size <= 0.5 * full


@pytest.mark.parametrize(
    "given",
    [
        {"macs": 0},
        {"macs": 1.5},
        {"params": -1},
        {"latency": True},
        {"max_error": "small"},
        {"macs": 0.5, "params": 0.5},
        {"keep": 1.5},
        {"uniform": 1, "macs": 0.5},
        {},
    ],
)
def test_budgets_that_mean_nothing_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(lbyl.LbylError, match=next(iter(given), "exactly one of macs, params")):
        lbyl.Budget(**given)
