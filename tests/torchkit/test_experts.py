"""Mixtures of experts held in one tensor: taken apart, pruned, put together again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.torchkit.experts import SplitExperts, join_experts, split_experts
from support import quick

EXPERTS, WIDTH, NEURONS = 3, 6, 8


class Experts(nn.Module):
    """As Transformers have them: only experts that a token is sent to run."""

    def __init__(self) -> None:
        super().__init__()
        self.intermediate_dim = NEURONS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * NEURONS, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, NEURONS))
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for i in range(EXPERTS):
            token, place = torch.where(index == i)
            gate, up = F.linear(hidden[token], self.gate_up_proj[i]).chunk(2, dim=-1)
            found = F.linear(self.act_fn(gate) * up, self.down_proj[i])
            out = out.index_add(0, token, found * weights[token, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(4, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.last = Experts(), nn.Linear(WIDTH, 3)

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


def test_apart_they_compute_the_same_and_share_their_weights(
    model: nn.Module, inputs: Tensor
) -> None:
    apart = split_experts(model)
    assert isinstance(apart.get_submodule("experts"), SplitExperts)
    assert isinstance(model.get_submodule("experts"), Experts)
    assert torch.allclose(apart(inputs), model(inputs), atol=1e-5)
    shared = apart.get_parameter("experts.down_proj.1").data_ptr()
    assert shared == model.get_parameter("experts.down_proj")[1].data_ptr()
    assert join_experts(apart) == []
    assert torch.equal(apart(inputs), model(inputs))


def test_neurons_of_every_expert_are_a_unit_and_come_back_as_one_tensor(
    model: nn.Module, inputs: Tensor, result: lbyl.Result
) -> None:
    assert [u.name for u in lbyl.trace(model, inputs[:2])] == [
        f"experts.gate_up_proj.{i}" for i in range(EXPERTS)
    ]
    slim = result.model.get_submodule("experts")
    assert isinstance(slim, Experts) and slim.intermediate_dim == NEURONS // 2
    assert slim.gate_up_proj.shape == (EXPERTS, NEURONS, WIDTH)
    assert slim.down_proj.shape == (EXPERTS, WIDTH, NEURONS // 2)
    assert result.after.parameters == sum(p.numel() for p in result.model.parameters())


def test_each_expert_loses_its_own_neurons_exactly(
    model: nn.Module, inputs: Tensor, result: lbyl.Result
) -> None:
    silent = copy.deepcopy(model)
    with torch.no_grad():
        for i in range(EXPERTS):
            kept = result.plan.kept[f"experts.gate_up_proj.{i}"]
            pruned = [j for j in range(NEURONS) if j not in kept.tolist()]
            silent.get_parameter("experts.down_proj")[i, :, pruned] = 0
    cut = lbyl.compress(model, inputs[:2], result.plan, method="none").model
    assert torch.allclose(cut(inputs), silent(inputs), atol=1e-5)
    assert len({tuple(kept.tolist()) for kept in result.plan.kept.values()}) > 1


def test_what_went_is_fitted_with_the_weight_that_the_router_gives_each_token(
    model: nn.Module, inputs: Tensor, result: lbyl.Result
) -> None:
    exact = lbyl.methods.Echo(ridge=1e-9)
    known = quick.own_statistics(split_experts(model), inputs[:2], inputs)
    slim = lbyl.compress(model, inputs[:2], result.plan, method=exact, data=known).model
    with torch.no_grad():
        hidden = model.get_submodule("first")(inputs)
        weights, index = model.get_submodule("router")(hidden).softmax(-1).topk(2, -1)
        routed = torch.zeros(len(inputs), EXPERTS).scatter(1, index, weights).double()
        gated = model.get_parameter("experts.gate_up_proj").detach()
        for i in range(EXPERTS):
            gate, up = F.linear(hidden, gated[i]).chunk(2, dim=-1)
            neurons = (F.silu(gate) * up).double() * routed[:, i, None]
            down = model.get_parameter("experts.down_proj")[i].double()
            kept = result.plan.kept[f"experts.gate_up_proj.{i}"]
            best = torch.linalg.lstsq(neurons[:, kept], neurons @ down.T).solution.T
            new = slim.get_parameter("experts.down_proj")[i].double()
            wanted, got = (
                (neurons[:, kept] @ w.T - neurons @ down.T).square().sum() for w in (best, new)
            )
            assert got < 1.0001 * wanted


def test_experts_of_different_widths_stay_apart_and_load_so(
    model: nn.Module, inputs: Tensor, tmp_path: Path
) -> None:
    ratios = {"experts.gate_up_proj.0": 0.5}
    made = lbyl.compress(model, inputs[:2], ratios, data=inputs, criterion="l2")
    assert isinstance(made.model.get_submodule("experts"), SplitExperts)
    assert any("different widths" in note for note in made.fallbacks)
    lbyl.save(made, tmp_path / "slim")
    loaded = lbyl.load(tmp_path / "slim", model=Mixture().eval())
    assert torch.equal(loaded(inputs), made.model(inputs))


def test_equal_widths_load_into_the_original_and_refine(
    model: nn.Module, inputs: Tensor, result: lbyl.Result, tmp_path: Path
) -> None:
    lbyl.save(result, tmp_path / "slim")
    loaded = lbyl.load(tmp_path / "slim", model=Mixture().eval())
    assert torch.equal(loaded(inputs), result.model(inputs))
    assert loaded.experts.intermediate_dim == NEURONS // 2  # type: ignore[union-attr]
    refined = lbyl.refine(model, inputs[:2], result, 5, data=inputs)
    assert isinstance(refined.model.get_submodule("experts"), Experts)


def test_an_expert_that_no_token_is_sent_to_does_no_harm(inputs: Tensor) -> None:
    torch.manual_seed(0)
    model = Mixture().eval()
    with torch.no_grad():
        model.router.bias[2] = -1e4
    made = lbyl.compress(model, inputs[:2], {"experts.*": 0.5}, data=inputs)
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())
    others = {f"experts.gate_up_proj.{i}": 0.5 for i in range(2)}
    kept = made.plan.kept["experts.gate_up_proj.2"]
    assert len(kept) == NEURONS // 2
    spared = lbyl.compress(model, inputs[:2], others, data=inputs, criterion=made.criterion)
    assert torch.allclose(spared.model(inputs), made.model(inputs), atol=1e-5)


def test_experts_of_another_form_are_left_alone_with_a_reason(inputs: Tensor) -> None:
    class Turned(Experts):
        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return super().forward(hidden, index, weights).flip(-1)

    torch.manual_seed(0)
    model = Mixture().eval()
    model.experts = Turned()
    assert "mixture of experts" in lbyl.trace(model, inputs[:2]).unprunable["experts.down_proj"]
