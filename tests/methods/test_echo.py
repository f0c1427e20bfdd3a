"""`echo` and `moments` against ridge regressions solved in the tests, on any statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.delivery import close
from support.networks import NETWORKS, build, consumer_samples, example, randomise

Echo = lbyl.methods.Echo

# network, unit, kept channels
CASES = [
    ("chain", "0", [0, 2, 5, 6, 9]),
    ("chain", "3", [1, 2, 7]),
    ("biased", "0", [0, 1, 4, 8]),
    ("biased", "2", [0, 1, 4, 6]),
    ("basic", "conv1", [3, 4, 5, 6, 7]),
    ("bottleneck", "conv2", [1, 2, 3, 8]),
    ("flattened", "0", [0, 1, 6]),
    ("dense", "0", [0, 1, 2, 10, 11, 15]),
    ("three readers", "first", [0, 3, 4, 6]),
    ("faint", "0", [0, 2, 5, 6, 9]),
]


class ThreeReaders(nn.Module):
    """Channels go through a depthwise layer to a strided, a transposed and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.strided = nn.Conv2d(8, 5, (3, 2), stride=2, padding=(1, 0))
        self.wider = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.silu(self.depth(F.relu(self.norm(self.first(x)))))
        return self.strided(x), self.wider(x), self.head(x.mean((2, 3)))


def network(name: str) -> tuple[nn.Module, Tensor]:
    if name == "three readers":
        return randomise(ThreeReaders(), 11).double(), example("chain", 4).double()
    if name == "faint":  # a chain in which hardly anything varies
        model, x = network("chain")
        with torch.no_grad():
            model[1].weight *= 1e-3
            model[1].bias *= 1e-3
        return model, x
    return build(name, 11).double(), example(name, 4).double()


def rows(model: nn.Module, consumer: str) -> Tensor:
    """A weight as (outputs, inputs, taps)."""
    module = model.get_submodule(consumer)
    weight = module.weight.detach()
    weight = weight.transpose(0, 1) if isinstance(module, nn.ConvTranspose2d) else weight
    return weight.flatten(2) if weight.dim() > 2 else weight[..., None]


def made_up(statistics: lbyl.Statistics, seed: int = 0) -> lbyl.Statistics:
    """Moments that no images have, in place of those that were collected."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, moments in statistics.moments.items():
        size = len(moments.covariance)
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        mean = torch.randn(moments.mean.shape, generator=generator, dtype=torch.float64)
        spatial = (
            None
            if moments.spatial is None
            else torch.corrcoef(
                torch.randn(len(moments.spatial), 20, generator=generator, dtype=torch.float64)
            )
        )
        made[name] = replace(
            moments, mean=mean, covariance=root @ root.T / size, spatial=spatial, mixed=None
        )
    return lbyl.Statistics(made, "own")


def solved(right: Tensor, matrix: Tensor, ridge: float) -> Tensor:
    """right · (matrix + ε I)⁻¹, ε relative to the mean variance."""
    epsilon = max(ridge, 1e-9) * matrix.diagonal().mean()
    return torch.linalg.solve(matrix + epsilon * torch.eye(len(matrix)).double(), right.T).T


def whole(moments: Any, taps: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of all inputs at all taps, whatever they are told by."""
    mean, covariance = moments.mean, moments.covariance
    if moments.taps == 1:
        spatial = moments.spatial
        flat = torch.ones(taps, taps).double() if spatial is None else spatial
        size = len(flat)
        mean, covariance = mean.expand(-1, size), torch.kron(covariance, flat)
        if moments.columns is not None:
            order = moments.columns.flatten().argsort()
            mean, covariance = mean.flatten()[order][:, None], covariance[order][:, order]
    return mean.flatten(), covariance


def regression(moments: Any, old: Tensor, stays: Tensor, ridge: float) -> Tensor:
    """V_P + V_Q C_QP (C_PP + εI)⁻¹, by every tap or by channels with taps alike."""
    if moments.columns is not None:
        columns = moments.columns
        arranged = old[:, columns.flatten(), 0].unflatten(1, columns.shape)
        features = stays[columns[:, 0]]
        new = regression(replace(moments, columns=None), arranged, features, ridge)
        back = columns[features].flatten().argsort()
        return new.flatten(1)[:, back, None]
    flat = old.flatten(1) if moments.taps > 1 else old.transpose(1, 2).flatten(0, 1)
    places = stays.repeat_interleave(moments.taps)
    c = moments.covariance
    new = flat[:, places] + solved(
        flat[:, ~places] @ c[~places][:, places], c[places][:, places], ridge
    )
    if moments.taps > 1:
        return new.unflatten(1, (-1, moments.taps))
    return new.unflatten(0, (len(old), -1)).transpose(1, 2)


def assert_solved(
    model: nn.Module, result: lbyl.Result, statistics: lbyl.Statistics, unit: str, ridge: float
) -> None:
    """Weights are the regression; biases or norms take the mean, and norms the variance."""
    graph, slim = result.graph, result.model
    kept = torch.as_tensor(result.plan.kept[unit])
    for name in graph[unit].consumers:
        consumer = graph.consumers[name]
        stays = torch.isin(consumer.channel - graph[unit].start, kept) | (consumer.channel < 0)
        old, new, moments = rows(model, name), rows(slim, name), statistics.moments[name]
        wanted = regression(moments, old, stays, ridge)
        mean, covariance = whole(moments, old.shape[2])
        padded = torch.zeros_like(old).index_copy(1, stays.nonzero()[:, 0], wanted)
        before, after = old.flatten(1), padded.flatten(1)
        was, now = (((w @ covariance) * w).sum(1) for w in (before, after))
        factor = (now / was).clamp(0.05, 4.0)
        if graph.forgot and old.shape[2] > 1:  # of a network without norms the weight takes it
            after, wanted = after / factor.sqrt()[:, None], wanted / factor.sqrt()[:, None, None]
        close(new, wanted, 1e-7)
        shift = (after - before) @ mean
        if consumer.norm is None:
            bias = getattr(model.get_submodule(name), "bias", None)
            was = 0 if bias is None else bias.detach()
            close(slim.get_submodule(name).bias.detach(), was - shift, 1e-7)
            continue
        norm, behind = (
            m.get_submodule(consumer.norm.mean[: -len(".running_mean")]) for m in (model, slim)
        )
        close(behind.running_mean, norm.running_mean + shift, 1e-7)
        wanted = (norm.running_var + norm.eps) * factor - norm.eps
        close(behind.running_var, wanted.clamp(min=0), 1e-7)


@pytest.mark.parametrize(("name", "unit", "kept"), CASES, ids=str)
def test_weights_and_corrections_are_those_of_the_regression(
    name: str, unit: str, kept: list[int]
) -> None:
    model, x = network(name)
    for taps, ridge in (("auto", 0.01), ("auto", 1e-5), ("channels", 0.01)):
        collected = lbyl.prepare(model, x, data=16).statistics(taps=taps)
        for statistics in (collected, made_up(collected)):
            prepared = lbyl.prepare(model, x, data=statistics)
            plan = lbyl.Plan({unit: torch.tensor(kept)}, {unit: prepared.graph[unit].channels})
            method = Echo(ridge, taps=taps, correction="mean+variance")
            result = prepared.compress(plan, method=method)
            assert all(line.startswith("statistics are those") for line in result.fallbacks)
            assert_solved(model, result, statistics, unit, ridge)


@pytest.mark.parametrize("name", ["chain", "dense", "flattened"])
def test_from_own_inputs_to_weights_without_any_help(name: str) -> None:
    """Least squares on what hooks see; 64 further inputs' worth are data-free."""
    unit, reader, stays = {
        "chain": ("0", "3", torch.arange(10).repeat_interleave(9) < 5),
        "dense": ("0", "3", torch.arange(16) < 5),
        "flattened": ("0", "5", torch.arange(128) < 80),
    }[name]
    model, x = build(name, 3).double(), example(name, 100).double()
    free = lbyl.prepare(model, x[:2]).statistics().moments[reader].covariance
    seen = consumer_samples(model, reader, x)[0]
    c = torch.lerp(free, torch.cov(seen.T, correction=0), 100 / 164)
    old = model.get_submodule(reader).weight.detach().flatten(1)
    wanted = old[:, stays] + solved(old[:, ~stays] @ c[~stays][:, stays], c[stays][:, stays], 0.01)
    plan = lbyl.Plan({unit: torch.arange(5)}, {unit: len(model[0].weight)})
    for method in ("echo", Echo(correction="none")):
        slim = lbyl.compress(model, x[:2], plan, data=x, method=method).model
        close(slim.get_submodule(reader).weight.detach().flatten(1), wanted, 1e-6)


def test_columns_of_a_channel_are_served_alike() -> None:
    model, x = network("flattened")
    whole_ = lbyl.prepare(model, x, data=16).statistics()
    columns = torch.arange(128).reshape(8, 16)[:, torch.randperm(16)]
    spatial = torch.corrcoef(torch.randn(16, 30).double())
    moments = replace(
        made_up(whole_).moments["5"],
        mean=torch.randn(8, 1).double(),
        covariance=torch.cov(torch.randn(8, 20).double()),
        columns=columns,
        spatial=spatial,
        taps=1,
    )
    statistics = lbyl.Statistics({"5": moments}, "own")
    prepared = lbyl.prepare(model, x, data=statistics)
    plan = lbyl.Plan({"0": torch.tensor([0, 2, 3, 6])}, {"0": 8})
    result = prepared.compress(plan, method=Echo(correction="mean+variance"))
    assert_solved(model, result, statistics, "0", 0.01)


def test_without_a_place_for_means_kept_inputs_take_them_over() -> None:
    """Second moments then stand in place of covariances."""
    model, x = network("biased")
    statistics = made_up(lbyl.prepare(model, x, data=16).statistics())
    plan = lbyl.Plan({"2": torch.tensor([0, 2, 3, 6])}, {"2": 8})
    prepared = lbyl.prepare(model, x, data=statistics)
    slim = prepared.compress(plan, method=Echo(new_bias=False)).model
    moments = statistics.moments["6"]
    second = moments.covariance + moments.mean @ moments.mean.T
    stays = torch.isin(torch.arange(8), plan.kept["2"])
    wanted = regression(replace(moments, covariance=second), rows(model, "6"), stays, 0.01)
    close(rows(slim, "6"), wanted, 1e-7)
    assert slim[6].bias is None
    assert prepared.compress(plan, method=Echo(correction="mean")).model[6].bias is not None


def indefinite(size: int, low: float) -> Tensor:
    vectors = torch.linalg.qr(torch.randn(size, size).double())[0]
    return vectors @ torch.diag(torch.linspace(low, 4, size).double()) @ vectors.T


def test_of_an_indefinite_covariance_the_positive_part_is_inverted() -> None:
    model, x = network("dense")
    collected = lbyl.prepare(model, x, data=16).statistics()
    kept, gone = torch.arange(10), torch.arange(10, 16)
    c = indefinite(16, -3)
    moments = replace(collected.moments["3"], covariance=c, mixed=None)
    prepared = lbyl.prepare(model, x, data=lbyl.Statistics({**collected.moments, "3": moments}))
    plan = lbyl.Plan({"0": kept}, {"0": 16})
    result = prepared.compress(plan, method=Echo(correction="none"))
    values, vectors = torch.linalg.eigh(c[kept][:, kept])
    assert float(values[0]) < -0.1
    assert result.fallbacks == (
        "3: solved by eigenvalues: the covariance is not positive definite",
    )
    values = values.clamp(min=0)
    inverse = vectors @ torch.diag(1 / (values + 0.01 * values.mean())) @ vectors.T
    old = rows(model, "3")[..., 0]
    wanted = old[:, kept] + old[:, gone] @ c[gone][:, kept] @ inverse
    close(rows(result.model, "3")[..., 0], wanted)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0])
def test_covariances_that_cannot_be_inverted_deliver_nothing(broken: float) -> None:
    model, x = network("dense")
    collected = lbyl.prepare(model, x, data=16).statistics()
    covariance = torch.full((16, 16), broken).double()
    moments = replace(collected.moments["3"], covariance=covariance, mixed=None)
    prepared = lbyl.prepare(model, x, data=lbyl.Statistics({**collected.moments, "3": moments}))
    plan = lbyl.Plan({"0": torch.arange(10)}, {"0": 16})
    result = prepared.compress(plan, method=Echo(correction="none"))
    close(rows(result.model, "3"), rows(model, "3")[:, :10])
    assert bool(result.fallbacks) == (broken != 0)


@pytest.mark.parametrize(("name", "unit", "kept"), CASES[:2] + CASES[5:8], ids=str)
def test_moments_is_the_same_regression_on_what_the_weights_tell(
    name: str, unit: str, kept: list[int]
) -> None:
    model, x = network(name)
    statistics = lbyl.prepare(model, x, data="analytic").statistics()
    assert set(lbyl.trace(model, x)[unit].consumers) <= set(statistics.moments)
    plan = lbyl.Plan({unit: torch.tensor(kept)}, {unit: lbyl.trace(model, x)[unit].channels})
    result = lbyl.compress(model, x, plan, method="moments")
    assert result.method["correction"] == "mean+variance" and result.data == "analytic"
    assert_solved(model, result, statistics, unit, 0.01)


def test_a_users_own_images_count_for_moments_as_well() -> None:
    model, x = build("chain", 3).double(), example("chain", 40).double()
    plan = lbyl.Plan({"0": torch.arange(5)}, {"0": 10})
    found = [
        lbyl.compress(model, x[:2], plan, data=x, method=method).model[3].weight
        for method in ("moments", Echo(correction="mean+variance"))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("method", lbyl.methods.names())
def test_corrections_leave_an_unpruned_network_alone(method: str) -> None:
    correcting = replace(lbyl.methods.resolve(method), correction="mean+variance")
    for name in NETWORKS if method == "echo" else ("chain", "biased"):
        model, x = build(name), example(name)
        statistics = lbyl.prepare(model, x, data="analytic").statistics()
        result = lbyl.prepare(model, x, data=statistics).compress(0.0, method=correcting)
        state = model.state_dict()
        assert result.model.state_dict().keys() == state.keys()
        assert all(torch.equal(v, state[k]) for k, v in result.model.state_dict().items())


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(lbyl.LbylError, match="'auto' or 'channels'"):
        Echo(taps="all")
    with pytest.raises(lbyl.LbylError, match="ridge"):
        Echo(ridge=-0.1)
