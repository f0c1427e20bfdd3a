"""Networks with several mixtures of experts are loaded as they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lbyl
from support.experts import EXPERTS, Experts

WIDTH = 8


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, index, weights)


def network() -> nn.Sequential:
    mixtures = [Mixture() for _ in range(2)]
    return nn.Sequential(nn.Linear(4, WIDTH), *mixtures, nn.Linear(WIDTH, 3)).eval()


@pytest.fixture
def result() -> lbyl.Result:
    """The first mixture has experts of different widths, the second of equal ones."""
    torch.manual_seed(0)
    ratios = {"1.experts.gate_up_proj.0": 0.5, "2.experts.*": 0.5}
    return lbyl.compress(network(), torch.randn(5, 4), ratios, method="none", criterion="l2")


def test_mixtures_of_different_and_of_equal_widths_load_from_one_file(
    result: lbyl.Result, tmp_path: Path
) -> None:
    kinds = [type(result.model.get_submodule(f"{i}.experts")) is Experts for i in (1, 2)]
    assert kinds == [False, True]
    lbyl.save(result, tmp_path / "slim")
    loaded, x = lbyl.load(tmp_path / "slim", network()), torch.randn(20, 4)
    assert torch.equal(loaded(x), result.model(x))


def test_mixtures_load_into_a_network_whose_own_weights_are_no_numbers(
    result: lbyl.Result, tmp_path: Path
) -> None:
    lbyl.save(result, tmp_path / "slim")
    fresh, x = network(), torch.randn(20, 4)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(torch.nan)
    assert torch.equal(lbyl.load(tmp_path / "slim", fresh)(x), result.model(x))


def test_experts_that_stand_in_two_places_stay_one(tmp_path: Path) -> None:
    def shared() -> nn.Sequential:
        model = network()
        model[2].experts = model[1].experts
        return model

    torch.manual_seed(0)
    model, x = shared(), torch.randn(5, 4)
    for ratios in ({"*": 0.5}, {"1.experts.gate_up_proj.0": 0.5}):
        result = lbyl.compress(model, x, ratios, method="none", criterion="l2")
        slim = result.model
        assert slim.get_submodule("1.experts") is slim.get_submodule("2.experts")
        assert result.after.parameters < result.before.parameters
        lbyl.save(result, tmp_path / "slim")
        loaded = lbyl.load(tmp_path / "slim", shared())
        assert torch.equal(loaded(x), slim(x))
