"""Mixtures of experts held in one tensor: taken apart, pruned, put together again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support import quick
from support.experts import EXPERTS, NEURONS, Experts

WIDTH = 6


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(4, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.last = Experts(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        weights, index = self.router(hidden).softmax(-1).topk(2, -1)
        return torch.as_tensor(self.last(hidden + self.experts(hidden, index, weights)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Mixture().eval()


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return torch.randn(200, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def result(model: nn.Module, inputs: Tensor) -> lbyl.Result:
    return lbyl.compress(model, inputs[:2], {"experts.*": 0.5}, data=inputs, criterion="l2")


def test_neurons_of_every_expert_are_a_unit_and_come_back_as_one_tensor(
    model: nn.Module, inputs: Tensor, result: lbyl.Result, tmp_path: Path
) -> None:
    names = [f"experts.gate_up_proj.{i}" for i in range(EXPERTS)]
    assert [u.name for u in lbyl.trace(model, inputs[:2])] == names
    slim = result.model.get_submodule("experts")
    assert isinstance(slim, Experts) and slim.intermediate_dim == NEURONS // 2
    assert slim.gate_up_proj.shape == (EXPERTS, NEURONS, WIDTH)
    assert slim.down_proj.shape == (EXPERTS, WIDTH, NEURONS // 2)
    assert result.after.parameters == sum(p.numel() for p in result.model.parameters())
    lbyl.save(result, tmp_path / "slim")
    loaded = lbyl.load(tmp_path / "slim", model=Mixture().eval())
    assert torch.equal(loaded(inputs), result.model(inputs))
    assert loaded.get_submodule("experts").intermediate_dim == NEURONS // 2
    refined = lbyl.refine(model, inputs[:2], result, 5, data=inputs)
    assert isinstance(refined.model.get_submodule("experts"), Experts)


def silenced(model: nn.Module, plan: lbyl.Plan) -> nn.Module:
    quiet = copy.deepcopy(model)
    for i in range(EXPERTS):
        kept = plan.kept[f"experts.gate_up_proj.{i}"].tolist()
        pruned = [j for j in range(NEURONS) if j not in kept]
        quiet.get_parameter("experts.down_proj").data[i, :, pruned] = 0
    return quiet


def test_each_expert_loses_its_own_neurons_exactly(
    model: nn.Module, inputs: Tensor, result: lbyl.Result
) -> None:
    cut = lbyl.compress(model, inputs[:2], result.plan, method="none").model
    assert torch.allclose(cut(inputs), silenced(model, result.plan)(inputs), atol=1e-5)
    assert len({tuple(kept.tolist()) for kept in result.plan.kept.values()}) > 1


def test_what_went_is_fitted_with_the_weight_that_the_router_gives_each_token(
    model: nn.Module, inputs: Tensor, result: lbyl.Result
) -> None:
    exact = lbyl.methods.Echo(ridge=1e-9)
    known = quick.own_statistics(model, inputs[:2], inputs)
    slim = lbyl.compress(model, inputs[:2], result.plan, method=exact, data=known).model
    with torch.no_grad():
        hidden = model.get_submodule("first")(inputs)
        weights, index = model.get_submodule("router")(hidden).softmax(-1).topk(2, -1)
        routed = torch.zeros(len(inputs), EXPERTS).scatter(1, index, weights).double()
        gated = model.get_parameter("experts.gate_up_proj")
        for i, kept in enumerate(result.plan.kept.values()):
            gate, up = F.linear(hidden, gated[i]).chunk(2, dim=-1)
            neurons = (F.silu(gate) * up).double() * routed[:, i, None]
            wanted = neurons @ model.get_parameter("experts.down_proj")[i].double().T
            best = torch.linalg.lstsq(neurons[:, kept], wanted).solution
            found = slim.get_parameter("experts.down_proj")[i].double().T
            off = [(neurons[:, kept] @ w - wanted).square().sum() for w in (best, found)]
            assert off[1] < 1.0001 * off[0]


def test_experts_of_different_widths_stay_apart_and_load_so(
    model: nn.Module, inputs: Tensor, tmp_path: Path
) -> None:
    some = {"experts.gate_up_proj.0": 0.5}
    made = lbyl.compress(model, inputs[:2], some, data=inputs, criterion="l2")
    assert any("different widths" in note for note in made.fallbacks)
    lbyl.save(made, tmp_path / "slim")
    loaded = lbyl.load(tmp_path / "slim", model=Mixture().eval())
    assert torch.equal(loaded(inputs), made.model(inputs))
    bare = lbyl.compress(model, inputs[:2], made.plan, method="none").model
    assert torch.allclose(bare(inputs), silenced(model, made.plan)(inputs), atol=1e-5)


def test_an_expert_that_no_token_is_sent_to_does_no_harm(inputs: Tensor) -> None:
    model = Mixture().eval()
    model.router.bias.data[2] = -1e4
    made = lbyl.compress(model, inputs[:2], {"experts.*": 0.5}, data=inputs)
    others = {f"experts.gate_up_proj.{i}": 0.5 for i in range(2)}
    spared = lbyl.compress(model, inputs[:2], others, data=inputs, criterion=made.criterion)
    assert len(made.plan.kept["experts.gate_up_proj.2"]) == NEURONS // 2
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())
    assert torch.allclose(spared.model(inputs), made.model(inputs), atol=1e-5)
