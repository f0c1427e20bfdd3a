"""No finite network may fail: dead filters, constant channels, duplicates, scales at the ends."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app.sources import zoo
from support import quick

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


@functools.cache
def trained() -> Separable:
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


def separable() -> Separable:
    return copy.deepcopy(trained())


Change = Callable[[Separable], Any]


def norms(model: Separable) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def dead(model: Separable) -> None:
    model.blocks[0][0].weight[::2] = 0
    model.head[0].weight[:30] = 0


def dead_but_remembered(model: Separable) -> None:
    dead(model)
    for norm in (model.blocks[0][1], model.head[1]):
        norm.running_var.fill_(1.0)


def duplicated_outputs(model: Separable) -> None:
    for layer, half in ((model.head[0], 20), (model.blocks[0][0], 18), (model.blocks[0][6], 6)):
        layer.weight[half:] = layer.weight[:half]


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


def scaled(factor: float) -> Change:
    def change(model: Separable) -> None:
        for norm in (model.stem[1], model.blocks[0][1], model.blocks[0][4], model.head[1]):
            norm.weight *= factor
            norm.bias *= factor

    return change


CASES: dict[str, Change] = {
    "dead in consumers": dead,
    "all dead in a consumer": lambda m: m.head[0].weight.zero_(),
    "dead but remembered": dead_but_remembered,
    "dead in producers": lambda m: (
        m.stem[0].weight[:6].zero_(),
        m.blocks[1][0].weight[:20].zero_(),
    ),
    "all dead in a producer": lambda m: m.blocks[1][0].weight.zero_(),
    "dead in a depthwise layer": lambda m: m.blocks[0][3].weight[5:30].zero_(),
    "all dead in a depthwise layer": lambda m: m.blocks[0][3].weight.zero_(),
    "some without variance": lambda m: [n.running_var[::3].zero_() for n in norms(m)],
    "no variance at all": lambda m: [n.running_var.zero_() for n in norms(m)],
    "some switched off": lambda m: [
        (n.weight[::2].zero_(), n.bias[::2].fill_(-3)) for n in norms(m)
    ],
    "all switched off": lambda m: [
        (n.weight.zero_(), n.bias.fill_(-1)) for n in (m.blocks[0][1], m.blocks[0][4])
    ],
    "duplicated outputs": duplicated_outputs,
    "duplicated channels": duplicated_channels,
    "all but dead": all_but_dead,
    "scaled by 1e-18": scaled(1e-18),
    "scaled by 1e-6": scaled(1e-6),
    "scaled by 1e6": scaled(1e6),
}


def degenerate(case: str) -> Separable:
    model = separable()
    with torch.no_grad():
        CASES[case](model)
    return model


def check(result: lbyl.Result) -> None:
    assert all(v.isfinite().all() for v in result.model.state_dict().values())
    assert result.after.parameters < result.before.parameters


MEASURED = ("echo", "fold", "lbyl", "moments", "neuron-merging")  # the others only copy or sum
PAIRS = [  # each case with one method in turn, each method with every case where there is time
    pytest.param(case, method, marks=() if i % 5 == j else pytest.mark.slow)
    for i, case in enumerate(CASES)
    for j, method in enumerate(MEASURED)
]
FEW = [  # these in three ways, of which the first is quick
    pytest.param(case, marks=pytest.mark.slow if i else ())
    for i, case in enumerate(("no variance at all", "all dead in a consumer", "scaled by 1e6"))
]


@pytest.mark.parametrize(("case", "method"), PAIRS)
def test_what_is_degenerate_is_restored(case: str, method: str) -> None:
    data = 32 if method == "echo" else None
    check(lbyl.compress(degenerate(case), IMAGE, 0.5, method=method, data=data))


@pytest.mark.parametrize("case", FEW)
def test_what_is_degenerate_meets_a_budget_and_is_refined_and_fitted(case: str) -> None:
    budget = lbyl.Budget(macs=0.6)
    result = lbyl.compress(degenerate(case), IMAGE, budget, criterion="echo", data=32)
    check(result)
    assert result.after.macs <= 0.6 * result.before.macs
    own, given = torch.randn(32, 3, 16, 16), {"criterion": "l2"}
    check(lbyl.compress(degenerate(case), IMAGE, 0.3, data=own, refine=2, **given))
    method = lbyl.methods.Echo(sequential=True)
    check(lbyl.compress(degenerate(case), IMAGE, 0.3, method=method, data=own, **given))


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


# ------------------------------------------------------------- statistics made by hand


def by_hand(covariance: Tensor, kept: int = 2) -> lbyl.Result:
    """A network of two layers restored by a covariance of what its last layer reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(16, 2).double()
    statistics = quick.own_statistics(model, x[:2], x)
    own = replace(statistics.moments["2"], covariance=covariance.double())
    known = lbyl.Statistics({"2": own}, "own")
    plan = lbyl.Plan({"0": torch.arange(kept)}, {"0": 4})
    result = lbyl.compress(model, x[:2], plan, data=known)
    assert bool(result.model(x).isfinite().all())
    assert float(result.model[2].weight.detach().abs().max()) < 10
    return result


def test_an_indefinite_covariance_is_solved_by_its_positive_part_and_noted() -> None:
    result = by_hand(torch.diag(torch.tensor([2.0, -0.1, 1.0, 1.0])))
    assert any(line.startswith("2: ") for line in result.fallbacks), result.fallbacks


def test_nothing_is_delivered_where_nothing_varies() -> None:
    result = by_hand(torch.zeros(4, 4))
    plain = by_hand(torch.eye(4))
    assert not result.fallbacks
    torch.testing.assert_close(result.model[2].weight, plain.model[2].weight, rtol=2e-2, atol=1e-9)


def test_channels_that_never_vary_leave_weights_of_sensible_size() -> None:
    """Rounding divided by rounding: a covariance with constants that do not vary at all."""
    covariance = torch.full((4, 4), 1e-20).double()
    covariance[:2, :2] = 1e-300 * torch.eye(2)
    assert any("beyond all measure" in line for line in by_hand(covariance).fallbacks)


def test_a_method_that_does_harm_is_not_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    class Harmful(lbyl.methods.Echo):
        def rewrite(self, rewrite: Any) -> Tensor:
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


def test_efficientnet_lite0_is_compressed(shared: Path) -> None:
    weights = shared / "models" / "efficientnet_lite0_imagenet.safetensors"
    if not weights.is_file():
        pytest.skip(f"no {weights}")
    model = zoo.create("efficientnet_lite0_imagenet", weights)
    result = lbyl.compress(model, torch.zeros(1, 3, 64, 64), {"*": 0.3}, criterion="l2", data=32)
    check(result)
