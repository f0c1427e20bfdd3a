"""No finite network may fail: dead filters, constant channels, duplicates, scales at the ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.methods.base import Rewrite
from lbyl.models import zoo
from lbyl.statistics.moments import Moments
from lbyl.statistics.solve import ridge_inverse, solve_ridge
from lbyl.torchkit.fallbacks import at, note, noting
from support.matching import matched

IMAGE = torch.zeros(1, 3, 16, 16)


class Separable(nn.Module):
    """A stem, two inverted bottlenecks, a head: consumers with more outputs than inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12))
        self.blocks = nn.ModuleList([Bottleneck(12), Bottleneck(12)])
        self.head = nn.Sequential(nn.Conv2d(12, 40, 1, bias=False), nn.BatchNorm2d(40))
        self.fc = nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.fc(self.head(x).relu().mean((2, 3)))
        return out


class Bottleneck(nn.Sequential):
    def __init__(self, width: int) -> None:
        wide = 3 * width
        super().__init__(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide)),
            *(nn.ReLU6(), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
        )


def separable() -> Separable:
    torch.manual_seed(1)
    model = Separable()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.2, 0.5)
    with torch.no_grad():  # running statistics as training leaves them
        model.train()
        for _ in range(20):
            model(torch.randn(64, 3, 16, 16))
    return model.eval()


def dead_in_consumer(model: Separable) -> None:
    model.blocks[0][0].weight[::2] = 0
    model.head[0].weight[:30] = 0


def all_dead_in_consumer(model: Separable) -> None:
    model.head[0].weight.zero_()


def dead_but_remembered(model: Separable) -> None:
    dead_in_consumer(model)
    for norm in (model.blocks[0][1], model.head[1]):
        norm.running_var.fill_(1.0)


def dead_in_producer(model: Separable) -> None:
    model.stem[0].weight[:6] = 0
    model.blocks[1][0].weight[:20] = 0


def all_dead_in_producer(model: Separable) -> None:
    model.blocks[1][0].weight.zero_()


def dead_in_depthwise(model: Separable) -> None:
    model.blocks[0][3].weight[5:30] = 0


def all_dead_in_depthwise(model: Separable) -> None:
    model.blocks[0][3].weight.zero_()


def no_variance(model: Separable) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var[::3] = 0


def no_variance_at_all(model: Separable) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.zero_()


def switched_off(model: Separable) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight[::2] = 0
            module.bias[::2] = -3


def switched_off_at_all(model: Separable) -> None:
    for norm in (model.blocks[0][1], model.blocks[0][4]):
        norm.weight.zero_()
        norm.bias.fill_(-1.0)


def duplicated_outputs(model: Separable) -> None:
    model.head[0].weight[20:] = model.head[0].weight[:20]
    model.blocks[0][0].weight[18:] = model.blocks[0][0].weight[:18]
    model.blocks[0][6].weight[6:] = model.blocks[0][6].weight[:6]


def duplicated_channels(model: Separable) -> None:
    for layer in (model.stem[0], model.blocks[1][0], model.blocks[1][3]):
        layer.weight[1:] = layer.weight[:1]
    for norm in (model.stem[1], model.blocks[1][1], model.blocks[1][4]):
        for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            values[1:] = values[:1].clone()


def all_but_dead(model: Separable) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight[::2] *= 1e-25


def scaled(factor: float) -> Callable[[Separable], None]:
    def change(model: Separable) -> None:
        for norm in (model.stem[1], model.blocks[0][1], model.blocks[0][4], model.head[1]):
            norm.weight *= factor
            norm.bias *= factor

    change.__name__ = f"scaled_{factor:g}"
    return change


CASES = [
    *(dead_in_consumer, all_dead_in_consumer, dead_but_remembered, dead_in_producer),
    *(all_dead_in_producer, dead_in_depthwise, all_dead_in_depthwise, no_variance),
    *(no_variance_at_all, switched_off, switched_off_at_all, duplicated_outputs),
    *(duplicated_channels, all_but_dead, scaled(1e-18), scaled(1e-6), scaled(1e6)),
]


def degenerate(change: Callable[[Separable], None]) -> Separable:
    model = separable()
    with torch.no_grad():
        change(model)
    return model


def check(result: lbyl.Result) -> None:
    assert all(v.isfinite().all() for v in result.model.state_dict().values())
    assert result.after.parameters < result.before.parameters


MEASURED = ("echo", "fold", "lbyl", "moments", "neuron-merging")  # the others only copy or sum


@pytest.mark.parametrize("method", MEASURED)
@pytest.mark.parametrize("change", CASES, ids=lambda c: c.__name__)
def test_what_is_degenerate_is_restored(change: Callable[[Separable], None], method: str) -> None:
    data = 32 if method == "echo" else None
    check(lbyl.compress(degenerate(change), IMAGE, 0.5, method=method, data=data))


FEW = [all_dead_in_consumer, all_dead_in_depthwise, no_variance_at_all, all_but_dead, scaled(1e6)]


@pytest.mark.parametrize("change", FEW, ids=lambda c: c.__name__)
def test_a_budget_is_met_by_what_is_degenerate(change: Callable[[Separable], None]) -> None:
    budget = lbyl.Budget(macs=0.6)
    result = lbyl.compress(degenerate(change), IMAGE, budget, criterion="echo", data=32)
    check(result)
    assert result.after.macs <= 0.6 * result.before.macs


@pytest.mark.parametrize("change", FEW, ids=lambda c: c.__name__)
def test_what_is_degenerate_is_refined_and_fitted(change: Callable[[Separable], None]) -> None:
    model, own = degenerate(change), torch.randn(32, 3, 16, 16)
    check(lbyl.compress(model, IMAGE, 0.3, criterion="l2", data=own, refine=5))
    method = lbyl.methods.Echo(sequential=True)
    check(lbyl.compress(model, IMAGE, 0.3, criterion="l2", method=method, data=own))


def test_a_healthy_network_needs_no_fallback() -> None:
    result = lbyl.compress(separable(), IMAGE, 0.5, criterion="echo", data=64)
    assert result.fallbacks == () and result.to_dict()["fallbacks"] == []


def overflowing() -> nn.Sequential:
    """Finite weights that make infinite activations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    model.append(nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight *= 1e3
        model[2].weight.mul_(1e39).clamp_(-1e38, 1e38)
    return model


def test_inputs_that_overflow_leave_their_layer_without_statistics() -> None:
    result = lbyl.compress(overflowing(), torch.zeros(1, 8), 0.5, data=64)
    assert any("not finite" in line for line in result.fallbacks)
    assert all(v.isfinite().all() for v in result.model.state_dict().values())
    assert "fallbacks" in str(result)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_that_float32_cannot_hold_are_summed_in_float64(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plain = lbyl.compress(model, torch.zeros(1, 8), 0.5, criterion="l2", data=256).model
    with torch.no_grad():
        model[0].weight *= scale
        model[0].bias *= scale
        model[2].weight /= scale
    other = lbyl.compress(model, torch.zeros(1, 8), 0.5, criterion="l2", data=256).model
    assert torch.allclose(other[2].weight * scale, plain[2].weight, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------ one by one


def some_moments(features: int = 6) -> Moments:
    rows = torch.randn(4 * features, features).double()
    return Moments(torch.rand(features, 1).double(), rows.T @ rows / len(rows))


@pytest.mark.parametrize("outputs", [3, 20])
def test_nothing_is_asked_of_dead_outputs(outputs: int) -> None:
    moments, weight = some_moments(), torch.randn(outputs, 6).double()
    mean, variance = weight @ moments.mean[:, 0], torch.rand(outputs).double() + 0.5
    alive = matched(moments, weight, mean, variance)
    dead = torch.zeros(2, 6).double()
    both = matched(
        moments,
        torch.cat([weight, dead]),
        torch.cat([mean, torch.ones(2).double()]),
        torch.cat([variance, torch.ones(2).double()]),
    )
    assert both.covariance.isfinite().all()
    if outputs > 6:  # through the inputs, where only the noise of the mean output differs
        assert torch.allclose(both.covariance, alive.covariance, rtol=1e-9, atol=1e-9)
    assert not torch.equal(both.covariance, moments.covariance)


def test_an_indefinite_covariance_is_solved_by_its_positive_part() -> None:
    right = torch.randn(2, 4).double()
    with noting() as notes:
        solved = solve_ridge(right, torch.diag(torch.tensor([2.0, 1.0, 1.0, -1e-1]).double()), 1e-2)
    assert len(notes) == 1 and torch.allclose(solved[:, 1], right[:, 1] / 1.01)


def test_what_cannot_be_inverted_delivers_nothing() -> None:
    with noting() as notes:
        solved = solve_ridge(torch.ones(1, 2).double(), torch.full((2, 2), torch.nan).double(), 0.1)
    assert not solved.any() and "nothing is delivered" in notes[0]
    assert ridge_inverse(torch.full((2, 2), torch.inf), 0.1) is None


def test_nothing_is_delivered_where_nothing_varies() -> None:
    with noting() as notes:
        solved = solve_ridge(torch.zeros(1, 3).double(), torch.zeros(3, 3).double(), 0.01)
    assert not solved.any() and not notes


def test_a_method_that_does_harm_is_not_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    class Harmful(lbyl.methods.Echo):
        def rewrite(self, rewrite: Rewrite) -> Tensor:
            return 100 * super().rewrite(rewrite)

    prepared = lbyl.prepare(model, torch.zeros(1, 8), data=64)
    result = prepared.compress(0.5, criterion="l2", method=Harmful(correction="none"))
    plain = prepared.compress(0.5, criterion="l2", method="none")
    assert result.fallbacks[0].startswith("2: only cut")
    assert torch.equal(result.model[2].weight, plain.model[2].weight)


def test_results_and_statistics_keep_what_was_noted(tmp_path: Path) -> None:
    model = overflowing()
    prepared = lbyl.prepare(model, torch.zeros(1, 8), data=64)
    statistics = prepared.statistics()
    assert statistics.fallbacks == statistics.to("cpu").fallbacks != ()
    statistics.save(tmp_path / "statistics.safetensors")
    again = lbyl.Statistics.load(tmp_path / "statistics.safetensors")
    assert again.fallbacks == statistics.fallbacks
    result = lbyl.prepare(model, torch.zeros(1, 8), data=again).compress(0.5, criterion="l2")
    assert set(statistics.fallbacks) <= set(result.fallbacks)
    read = lbyl.Result.from_dict(result.to_dict(), result.model, result.plan)
    assert read.fallbacks == result.fallbacks and str(read) == str(result)


def test_notes_name_their_layer_and_come_once() -> None:
    note("nobody listens")
    with noting() as outer, at("layer"):
        note("this")
        note("this")
        with noting() as inner:
            note("that")
    assert outer == ["layer: this"] and inner == ["layer: that"]


def test_efficientnet_lite0_is_compressed(shared: Path) -> None:
    weights = shared / "models" / "efficientnet_lite0_imagenet.safetensors"
    if not weights.is_file():
        pytest.skip(f"no {weights}")
    model = zoo.create("efficientnet_lite0_imagenet", weights)
    result = lbyl.compress(model, torch.zeros(1, 3, 64, 64), {"*": 0.3}, criterion="l2", data=32)
    check(result)


def test_channels_that_never_vary_leave_weights_of_sensible_size() -> None:
    """Rounding divided by rounding: a covariance with constants that do not vary at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(16, 2).double()
    covariance = torch.full((4, 4), 1e-20).double()
    covariance[:2, :2] = 1e-300 * torch.eye(2)
    known = lbyl.Statistics({"2": Moments(torch.ones(4, 1).double(), covariance)}, "own")
    plan = lbyl.Plan({"0": torch.arange(2)}, {"0": 4})
    result = lbyl.compress(model, x[:2], plan, data=known)
    assert bool(result.model(x).isfinite().all())
    assert float(result.model[2].weight.detach().abs().max()) < 10
    assert any("beyond all measure" in line for line in result.fallbacks)
