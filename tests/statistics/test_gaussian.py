"""The analytic moments against sampling, against closed cases, and against any input at all."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.statistics.gaussian import (
    ACTIVATIONS,
    activation_moments,
    filter_correlation,
    hermite_moments,
    relu_moments,
)

MEAN = torch.tensor([0.0, 1.3, -0.7, 0.4, -2.0, 5.5], dtype=torch.float64)
STD = torch.tensor([1.0, 0.5, 2.0, 1.5, 1.0, 1.2], dtype=torch.float64)
SAMPLES = 1_000_000
NAMES = ["identity", "relu", *ACTIVATIONS]


def correlation(m: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(m, m + 1, generator=generator, dtype=torch.float64)
    factor = factor / factor.norm(dim=1, keepdim=True)
    return factor @ factor.T


@lru_cache(maxsize=1)
def gaussian_samples() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(correlation(6, 1))
    z = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return MEAN + STD * (z @ root.T)


def function(name: str) -> object:
    return {"identity": lambda z: z, "relu": torch.relu, **ACTIVATIONS}[name]


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_sampling(name: str) -> None:
    expected, covariance = activation_moments(name, MEAN, STD, correlation(6, 1))
    a = function(name)(gaussian_samples())
    centred = a - a.mean(0)
    # The standard errors of the sampled figures themselves, so the tolerance is five of them.
    error_mean = a.std(0) / math.sqrt(SAMPLES)
    second, fourth = centred.T @ centred / SAMPLES, centred.square().T @ centred.square() / SAMPLES
    error_cov = (fourth - second.square()).clamp_min(0).sqrt() / math.sqrt(SAMPLES)
    assert ((a.mean(0) - expected).abs() < 5 * error_mean + 1e-6).all()
    assert ((second - covariance).abs() < 5 * error_cov + 1e-5).all()


def test_relu_agrees_with_its_own_series() -> None:
    corr = correlation(6, 3)
    exact_mean, exact = relu_moments(MEAN, STD, corr)
    mean, series = hermite_moments(torch.relu, MEAN, STD, corr, order=64, nodes=20001)
    torch.testing.assert_close(mean, exact_mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(series, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_uncorrelated_channels_stay_so(name: str) -> None:
    _, covariance = activation_moments(name, MEAN, STD, torch.eye(6, dtype=torch.float64))
    off = covariance - covariance.diagonal().diag()
    assert off.abs().max() < 1e-12
    assert (covariance.diagonal() > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_equal_channels_share_their_variance(name: str) -> None:
    mean, std = torch.full((2,), 0.3), torch.full((2,), 1.1)
    _, covariance = activation_moments(name, mean, std, torch.ones(2, 2))
    variance = covariance.diagonal()
    torch.testing.assert_close(variance[0], variance[1])
    # Off the diagonal the series stops at its order, which costs a kinked function most.
    torch.testing.assert_close(covariance[0, 1], variance[0], rtol=1e-2, atol=0)
    if name in ("identity", "relu"):
        torch.testing.assert_close(covariance[0, 1], variance[0], rtol=1e-6, atol=0)


def test_half_normal() -> None:
    mean, covariance = relu_moments(torch.zeros(1), torch.ones(1), torch.ones(1, 1))
    assert mean.item() == pytest.approx(1 / math.sqrt(2 * math.pi), abs=1e-14)
    assert covariance.item() == pytest.approx(0.5 - 1 / (2 * math.pi), abs=1e-14)


def test_opposite_channels() -> None:
    # relu(z) relu(-z) = 0 always, so the covariance is minus the product of the means.
    corr = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    mean, covariance = relu_moments(torch.zeros(2), torch.ones(2), corr)
    assert covariance[0, 1].item() == pytest.approx(-(mean[0] * mean[1]).item(), abs=1e-9)


def test_identity_is_exact() -> None:
    corr = correlation(6, 2)
    mean, covariance = activation_moments("identity", MEAN, STD, corr)
    assert torch.equal(mean, MEAN)
    torch.testing.assert_close(covariance, STD[:, None] * corr * STD)
    by_series = hermite_moments(lambda z: z, MEAN, STD, corr)[1]
    torch.testing.assert_close(by_series, covariance)


def test_relu_far_above_zero_is_linear_and_far_below_is_nothing() -> None:
    corr, std = correlation(4, 5), torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    mean, covariance = relu_moments(torch.full((4,), 1e6), std, corr)
    torch.testing.assert_close(covariance, std[:, None] * corr * std, rtol=1e-12, atol=0)
    assert torch.equal(mean, torch.full((4,), 1e6, dtype=torch.float64))
    mean, covariance = relu_moments(torch.full((4,), -1e6), std, corr)
    assert mean.abs().max() == 0 and covariance.abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_no_deviation_gives_a_constant(name: str) -> None:
    mean = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    expected, covariance = activation_moments(name, mean, torch.zeros(3), correlation(3, 0))
    torch.testing.assert_close(expected, function(name)(mean))
    assert covariance.abs().max() < 1e-20


def test_batches_agree_with_one_at_a_time() -> None:
    corr = torch.stack([correlation(6, 1), correlation(6, 2)])
    for name in ("relu", "gelu"):
        means, covariances = activation_moments(name, MEAN.expand(2, 6), STD.expand(2, 6), corr)
        for i in range(2):
            mean, covariance = activation_moments(name, MEAN, STD, corr[i])
            torch.testing.assert_close(means[i], mean)
            torch.testing.assert_close(covariances[i], covariance)


def test_unknown_name_is_told() -> None:
    with pytest.raises(LbylError, match="wobble"):
        activation_moments("wobble", MEAN, STD, correlation(6, 1))


numbers = st.floats(-50, 50, allow_nan=False)
deviations = st.one_of(st.just(0.0), st.floats(1e-300, 1e-6), st.floats(1e-3, 20))


@st.composite
def gaussians(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    m = draw(st.integers(1, 6))
    rows = torch.tensor(
        [[draw(st.floats(-1, 1)) for _ in range(draw(st.just(3)))] for _ in range(m)],
        dtype=torch.float64,
    )
    rows = rows + torch.tensor([1e-3, 0.0, 0.0], dtype=torch.float64)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-9)
    corr = (rows @ rows.T).clamp(-1, 1).fill_diagonal_(1.0)
    mean = torch.tensor([draw(numbers) for _ in range(m)], dtype=torch.float64)
    std = torch.tensor([draw(deviations) for _ in range(m)], dtype=torch.float64)
    return mean, std, corr


@settings(max_examples=60, deadline=None)
@given(gaussians(), st.sampled_from(NAMES))
def test_always_finite_and_positive_semidefinite(
    gaussian: tuple[Tensor, Tensor, Tensor], name: str
) -> None:
    expected, covariance = activation_moments(name, *gaussian)
    assert expected.isfinite().all() and covariance.isfinite().all()
    torch.testing.assert_close(covariance, covariance.T)
    lowest = torch.linalg.eigvalsh(covariance)[0]
    # ReLU's integral is exact to about 1e-6 of the variances where correlations reach one.
    assert lowest >= -1e-5 * max(1e-12, covariance.diagonal().sum().item())


# ------------------------------------------------------------------------ filter_correlation


def filters(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 1, 1), (8, 5, 1)])
def test_pointwise_filters_give_cosines(shape: tuple[int, ...]) -> None:
    weight = filters(shape)
    unit = torch.nn.functional.normalize(weight.flatten(1), dim=1)
    torch.testing.assert_close(filter_correlation(weight, torch.ones(8)), unit @ unit.T)


@pytest.mark.parametrize("length", [0.3, 1.0, 4.0])
def test_finds_the_length_the_variances_were_made_with(length: float) -> None:
    weight = filters((64, 4, 3, 3))
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
    taps = torch.exp(-torch.cdist(places, places) / length)
    covariance = torch.einsum("oit,ts,pis->op", weight.flatten(2), taps, weight.flatten(2))
    scale = covariance.diagonal().rsqrt()
    found = filter_correlation(weight, 7.0 * covariance.diagonal())
    # The grid of lengths is 14 % apart, so the nearest is within 7 %.
    torch.testing.assert_close(found, covariance * scale[:, None] * scale, rtol=0, atol=0.02)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(6, 3), (6, 2, 3), (6, 2, 3, 3), (4, 1, 2, 3, 2)]), st.integers(0, 99))
def test_filter_correlation_is_a_correlation(shape: tuple[int, ...], seed: int) -> None:
    weight = filters(shape, seed)
    weight[seed % shape[0]] = 0  # a dead filter must not poison the others
    variance = filters((shape[0],), seed + 1).clamp_min(0)
    corr = filter_correlation(weight, variance)
    assert corr.isfinite().all() and torch.equal(corr.diagonal(), torch.ones(shape[0]).double())
    assert torch.linalg.eigvalsh(corr)[0] > -1e-10
    assert corr.abs().max() <= 1


def test_groups_do_not_correlate() -> None:
    corr = filter_correlation(filters((6, 2, 3, 3)), torch.ones(6), groups=3)
    inside = torch.block_diag(*[torch.ones(2, 2)] * 3).bool()
    assert (corr[~inside] == 0).all() and (corr[inside] != 0).all()


def variances(weight: Tensor, length: float) -> Tensor:
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
    taps = torch.exp(-torch.cdist(places, places) / length)
    return torch.einsum("oit,ts,ois->o", weight.flatten(2), taps, weight.flatten(2))


def test_two_variances_are_enough_to_fit_a_length_and_one_is_not() -> None:
    weight = filters((6, 2, 3, 3))
    short, long = (variances(weight, length) for length in (0.1, 30.0))
    none, unknown = torch.zeros(6).double(), torch.full((6,), torch.inf).double()
    for other in (none, unknown):
        two = [filter_correlation(weight, torch.cat([v[:2], other[2:]])) for v in (short, long)]
        assert float((two[0] - two[1]).abs().max()) > 0.05
        one = [filter_correlation(weight, torch.cat([v[:1], other[1:]])) for v in (short, long)]
        assert torch.equal(*one)
    # A length in the middle of the grid: between neighbours about one tap.
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
    middle = torch.logspace(-1.5, 2, 64).double()[32]
    taps = torch.exp(-torch.cdist(places, places) / middle)
    covariance = torch.einsum("oit,ts,pis->op", weight.flatten(2), taps, weight.flatten(2))
    scale = covariance.diagonal().rsqrt()
    torch.testing.assert_close(one[0], covariance * torch.outer(scale, scale), rtol=0, atol=1e-6)


def test_the_scale_of_the_input_does_not_matter() -> None:
    weight = filters((8, 3, 3, 3))
    variance = variances(weight, 0.2)
    found = [filter_correlation(weight, factor * variance) for factor in (1e-9, 1.0, 1e9)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("rho", [-0.999, -0.5, 0.0, 0.3, 0.95])
def test_rectified_pairs_agree_with_quadrature(rho: float) -> None:
    """E[relu(x) relu(y)] by a fine sum over the plane."""
    mean, std = torch.tensor([0.4, -0.7]).double(), torch.tensor([1.5, 0.6]).double()
    corr = torch.tensor([[1.0, rho], [rho, 1.0]]).double()
    z = torch.linspace(-9, 9, 3001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    density = density / density.sum()
    first = (mean[0] + std[0] * z).relu()
    across = rho * z[:, None] + (1 - rho**2) ** 0.5 * z
    second = (mean[1] + std[1] * across).relu() @ density  # given the first
    wanted = (first * second * density).sum() - (first @ density) * (second @ density)
    found_mean, covariance = relu_moments(mean, std, corr)
    assert float(covariance[0, 1]) == pytest.approx(float(wanted), abs=2e-6)
    assert float(found_mean[0]) == pytest.approx(float(first @ density), abs=1e-6)
    assert float(covariance[0, 0]) == pytest.approx(
        float(first.square() @ density - (first @ density) ** 2), abs=1e-5
    )


def test_a_polynomial_has_the_moments_of_its_hermite_series() -> None:
    """z² + z: mean 1, covariance 2ρ² + ρ."""
    corr = correlation(5, 3)
    zero, one = torch.zeros(5), torch.ones(5)
    mean, covariance = hermite_moments(lambda z: z.square() + z, zero, one, corr, order=2)
    torch.testing.assert_close(mean, one.double())
    torch.testing.assert_close(covariance, 2 * corr.square() + corr)
    mean, covariance = hermite_moments(lambda z: z.square() + z, zero, one, corr, order=1)
    torch.testing.assert_close(covariance, corr + 2 * torch.eye(5).double())
    assert torch.equal(
        hermite_moments(lambda z: z, zero, one, corr, order=0)[1].round(decimals=9),
        torch.eye(5).double(),
    )


def test_constants_however_large_leave_no_covariance() -> None:
    mean, covariance = hermite_moments(lambda z: 1e9 + 0 * z, MEAN, STD, correlation(6, 1))
    torch.testing.assert_close(mean, torch.full((6,), 1e9).double())
    assert float(covariance.abs().max()) < 1e-10
