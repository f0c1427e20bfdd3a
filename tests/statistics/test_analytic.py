"""Statistics from weights alone: against sampling, and where they must not be told at all."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.statistics.analytic import analytic_statistics
from lbyl.statistics.moments import Moments
from support.networks import NETWORKS, build, example, randomise

SAMPLES = 200_000
ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(inplace=True),
    "leaky": nn.LeakyReLU(0.2),
    "gelu": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "selu": nn.SELU(),
    "identity": nn.Identity(),
}


def tap_covariance(length: float) -> Tensor:
    """(9, 9): exp(−distance/ℓ) over a 3×3 kernel, by loops."""
    places = [(r, c) for r in range(3) for c in range(3)]
    rows = [[math.exp(-math.dist(a, b) / length) for b in places] for a in places]
    return torch.tensor(rows, dtype=torch.float64)


def layer(activation: nn.Module, length: float = 1.3) -> tuple[nn.Sequential, Tensor]:
    """Conv, BatchNorm, activation, reader; running statistics as inputs of that length make them.

    Also returns what the filters read: (samples, 3 · 9), independent between the three channels.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1, bias=False),
        nn.BatchNorm2d(7),
        activation,
        nn.Conv2d(7, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
    )
    randomise(model, 4).double()
    root = torch.linalg.cholesky(tap_covariance(length))
    patches = (torch.randn(SAMPLES, 3, 9, dtype=torch.float64) @ root.T).flatten(1)
    filters = model[0].weight.detach().flatten(1)
    made = patches @ filters.T
    model[1].running_mean.copy_(made.mean(0))
    model[1].running_var.copy_(made.var(0))
    with torch.no_grad():
        model[1].weight[2] *= -1  # a channel of each sign at least
    return model, patches


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mean_and_covariance_agree_with_sampling(name: str) -> None:
    model, patches = layer(ACTIVATIONS[name])
    norm = model[1]
    assert bool((norm.weight < 0).any()) and bool((norm.weight > 0).any())
    with torch.no_grad():
        made = patches @ model[0].weight.flatten(1).T
        activation = ACTIVATIONS[name]
        seen = activation(
            F.batch_norm(
                made, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
            )
        )
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    moments = analytic_statistics(model, lbyl.trace(model, x)).get("3")
    assert moments is not None and moments.taps == 1
    std = seen.std(0)
    assert float(((moments.mean[:, 0] - seen.mean(0)).abs() / std).max()) < 0.02
    gap = (moments.covariance - torch.cov(seen.T)) / torch.outer(std, std)
    # The grid of lengths is 14 % apart; with the nearest one correlations are this near.
    assert float(gap.abs().max()) < 0.03


@pytest.mark.parametrize("length", [0.4, 1.5, 6.0])
def test_neighbouring_taps_follow_the_variance_behind(length: float) -> None:
    model, _ = layer(nn.ReLU())
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = lbyl.trace(model, x)
    first = analytic_statistics(model, graph).get("3")
    assert first is not None
    weight = model[3].weight.detach().flatten(2)
    taps = tap_covariance(length)
    variance = torch.einsum("oik,ij,kl,ojl->o", weight, first.covariance, taps, weight)
    model[4].running_var.copy_(variance)
    again = analytic_statistics(model, graph).get("3")
    assert again is not None and again.spatial is not None
    torch.testing.assert_close(again.spatial, taps, rtol=0, atol=0.03)
    everything = torch.ones(len(again.mean), dtype=torch.bool)
    was, _, _ = again.output_change(weight, weight, everything)
    torch.testing.assert_close(was, variance, rtol=0.1, atol=0)


def test_without_a_norm_behind_all_taps_are_alike() -> None:
    model, x = build("functional"), example("functional")
    moments = analytic_statistics(model, lbyl.trace(model, x)).get("second")
    assert moments is not None and moments.spatial is not None
    assert torch.equal(moments.spatial, torch.ones(9, 9, dtype=torch.float64))


def test_without_batchnorm_filters_give_mean_and_deviation() -> None:
    model, x = build("dense", 1), example("dense")
    moments = analytic_statistics(model, lbyl.trace(model, x)).get("3")
    assert moments is not None
    inputs = torch.randn(SAMPLES, 12)
    with torch.no_grad():
        seen = model[0](inputs).relu()
    torch.testing.assert_close(moments.mean[:, 0].float(), seen.mean(0), rtol=0, atol=0.03)
    torch.testing.assert_close(moments.covariance.float(), torch.cov(seen.T), rtol=0, atol=0.06)


def test_columns_of_a_flatten_are_grouped_by_channel() -> None:
    model, x = build("flattened"), example("flattened")
    moments = analytic_statistics(model, lbyl.trace(model, x)).get("5")
    assert moments is not None and moments.columns is not None and moments.spatial is not None
    assert moments.columns.tolist() == torch.arange(128).reshape(8, 16).tolist()
    assert moments.covariance.shape == (8, 8) and moments.spatial.shape == (16, 16)


class Branches(nn.Module):
    """Two layers side by side, joined for one reader that also sees the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.b, self.nb = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)
        self.head = nn.Conv2d(14, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        sides = [F.relu(self.na(self.a(x))), F.silu(self.nb(self.b(x)))]
        return self.head(torch.cat([*sides, x], 1))


def test_units_joined_by_concatenation_are_uncorrelated() -> None:
    model, x = randomise(Branches()), torch.randn(2, 3, 4, 4)
    graph = lbyl.trace(model, x)
    moments = analytic_statistics(model, graph).get("head")
    assert moments is not None and moments.covariance.shape == (14, 14)
    blocks = torch.block_diag(torch.ones(6, 6), torch.ones(5, 5), torch.eye(3)).bool()
    assert bool((moments.covariance[~blocks] == 0).all())
    assert bool((moments.covariance[blocks] != 0).all())
    assert bool((moments.mean[11:] == 0).all())
    result = lbyl.compress(model, x, 0.4, method="moments")
    assert bool(result.model(x).isfinite().all())
    assert torch.equal(result.model.head.weight[:, -3:], model.head.weight[:, 11:])


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1),
    )  # fmt: skip


def differing() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1),
        nn.Conv2d(8, 4, 1), nn.LeakyReLU(0.3),
    )  # fmt: skip


@pytest.mark.parametrize("make", [depthwise, differing, NETWORKS["group-normed"]])
def test_what_the_weights_do_not_tell_gets_no_moments(make: object) -> None:
    assert callable(make)
    model, x = randomise(make()), torch.randn(2, 3, 8, 8)
    graph = lbyl.trace(model, x)
    statistics = analytic_statistics(model, graph)
    assert not statistics.moments and statistics.source == "analytic" and graph.units
    result = lbyl.compress(model, x, 0.5, method="moments")
    plain = lbyl.compress(model, x, 0.5, method="none")
    torch.testing.assert_close(result.model(x), plain.model(x))


@pytest.mark.parametrize("name", NETWORKS)
def test_covariances_are_finite_and_positive_semidefinite(name: str) -> None:
    model, x = build(name), example(name)
    if name == "chain":
        with torch.no_grad():
            model[1].weight[:3] = 0
            model[1].running_var[2:5] = 0
            model[0].weight[6] = 0
    for moments in analytic_statistics(model, lbyl.trace(model, x)).moments.values():
        assert bool(moments.mean.isfinite().all() and moments.covariance.isfinite().all())
        lowest = torch.linalg.eigvalsh(moments.covariance)[0]
        assert float(lowest) >= -1e-6 * float(moments.covariance.diagonal().sum())


def test_the_model_is_neither_run_nor_changed() -> None:
    model, x = build("chain"), example("chain")
    graph = lbyl.trace(model, x)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def refuse(*_: object) -> None:
        raise AssertionError("a module was run")

    for module in model.modules():
        module.register_forward_pre_hook(refuse)
    assert set(analytic_statistics(model, graph).moments) == {"3", "8"}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Path(nn.Module):
    """A layer and what `path` does to its channels in front of the next."""

    def __init__(self, *path: nn.Module, normed: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 1)
        self.path = nn.Sequential(*([nn.BatchNorm2d(6)] if normed else []), *path)
        self.last = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.path(self.first(x)))
        return out


def known(model: nn.Module) -> bool:
    model, x = randomise(model), torch.randn(2, 3, 8, 8)
    return analytic_statistics(model, lbyl.trace(model, x)).get("last") is not None


def test_one_activation_is_known_and_two_are_not() -> None:
    assert known(Path()) and known(Path(normed=False)) and known(Path(nn.ReLU(), normed=False))
    assert known(Path(nn.Tanh())) and known(Path(nn.AvgPool2d(2), nn.ReLU(), nn.Dropout()))
    assert not known(Path(nn.ReLU(), nn.Tanh()))
    assert not known(Path(nn.ReLU(), nn.Tanh(), nn.Sigmoid()))
    assert not known(Path(nn.Softshrink()))
    assert not known(Path(nn.ReLU(), nn.BatchNorm2d(6), normed=False))


def test_activations_have_the_parameters_of_their_modules() -> None:
    def of(*path: nn.Module) -> Moments:
        model, x = randomise(Path(*path), 3).double(), torch.randn(2, 3, 8, 8).double()
        found = analytic_statistics(model, lbyl.trace(model, x)).get("last")
        assert found is not None
        return found

    plain, steep = of(nn.LeakyReLU()), of(nn.LeakyReLU(0.7))
    assert float((plain.mean - steep.mean).abs().max()) > 0.01
    capped, straight = of(nn.ReLU6()), of(nn.ReLU())
    assert torch.equal(of(nn.ReLU6(inplace=True)).mean, capped.mean)
    torch.testing.assert_close(of(nn.Hardtanh(0.0, 6.0)).mean, capped.mean)
    assert float((capped.mean - straight.mean).max()) < 1e-5


def test_negative_gains_turn_correlations_round() -> None:
    model = randomise(Path(), 3).double()
    norm = model.path[0]
    with torch.no_grad():
        norm.weight.abs_()
    x = torch.randn(2, 3, 8, 8).double()
    graph = lbyl.trace(model, x)
    before = analytic_statistics(model, graph).get("last")
    with torch.no_grad():
        norm.weight[:2] *= -1
    after = analytic_statistics(model, graph).get("last")
    assert before is not None and after is not None
    sign = torch.tensor([-1.0, -1, 1, 1, 1, 1]).double()
    torch.testing.assert_close(after.covariance, before.covariance * torch.outer(sign, sign))
    torch.testing.assert_close(after.covariance.diagonal(), norm.weight.detach().square())
    torch.testing.assert_close(after.mean[:, 0], norm.bias.detach())


def test_inputs_that_no_unit_makes_have_the_mean_variance() -> None:
    model, x = randomise(Branches()), torch.randn(2, 3, 4, 4)
    found = analytic_statistics(model, lbyl.trace(model, x)).get("head")
    assert found is not None
    made = found.covariance.diagonal()
    torch.testing.assert_close(made[11:], made[:11].mean().expand(3))
