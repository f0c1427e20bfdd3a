"""`lbyl`: its closed forms against the published objective, minimised directly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lbyl
from lbyl.graph.weights import NormWeights, UnitWeights, unit_weights
from lbyl.methods.base import identity_rows
from lbyl.surgery.indices import pruned_of
from support.networks import build, example

STRENGTHS = st.sampled_from([(1e-5, 2e-3), (0.0, 0.1), (1.0, 1e-3), (0.03, 1.0), (5.0, 0.5)])


def layer(name: str, unit: str, seed: int) -> UnitWeights:
    model = build(name, seed)
    return unit_weights(lbyl.trace(model, example(name)), model)[unit]


def some_kept(channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(channels, generator=generator)[: channels // 2].sort().values


def published(weights: UnitWeights) -> tuple[Tensor, NormWeights]:
    assert weights.norm is not None
    return weights.filters, weights.norm


def objective(
    weights: UnitWeights, kept: Tensor, j: int, s: Tensor, strengths: tuple[float, float]
) -> Tensor:
    """‖y − Xs‖² + λ₁(γ_j/σ_j)²(pᵀs − μ_j + σ_jβ_j/γ_j)² + λ₂‖s‖², term by term."""
    f, norm = published(weights)
    gamma, beta, mu, sigma = norm.gamma, norm.beta, norm.mean, norm.sigma
    kappa = sigma[j] * gamma[kept] / (gamma[j] * sigma[kept])
    p = kappa * (mu[kept] - sigma[kept] * beta[kept] / gamma[kept])
    residual = f[j] - (kappa[:, None] * f[kept]).T @ s
    constant = p @ s - mu[j] + sigma[j] * beta[j] / gamma[j]
    weight = strengths[0] * (gamma[j] / sigma[j]) ** 2
    return residual @ residual + weight * constant**2 + strengths[1] * s @ s


def direct_theorem(
    weights: UnitWeights, kept: Tensor, j: int, strengths: tuple[float, float]
) -> Tensor:
    f, norm = published(weights)
    gamma, beta, mu, sigma = norm.gamma, norm.beta, norm.mean, norm.sigma
    kappa = sigma[j] * gamma[kept] / (gamma[j] * sigma[kept])
    x = (kappa[:, None] * f[kept]).T
    p = kappa * (mu[kept] - sigma[kept] * beta[kept] / gamma[kept])
    g = gamma[j] / sigma[j]
    matrix = x.T @ x + strengths[0] * g**2 * torch.outer(p, p)
    matrix = matrix + strengths[1] * torch.eye(len(kept), dtype=torch.float64)
    right = x.T @ f[j] + strengths[0] * g * (mu[j] * g - beta[j]) * p
    return torch.linalg.solve(matrix, right)


def direct_released(
    weights: UnitWeights, kept: Tensor, j: int, strengths: tuple[float, float]
) -> Tensor:
    f, norm = published(weights)
    gamma, beta, mu, sigma = norm.gamma, norm.beta, norm.mean, norm.var
    x, g = f[kept].T, gamma[j] / sigma[j]
    p = mu[kept] - sigma[kept] * beta[kept] / gamma[kept]
    k = gamma[j] * sigma[kept] / (gamma[kept] * sigma[j])
    diagonal = strengths[0] * g**2 * (p @ p) + strengths[1] * k**2
    right = x.T @ f[j] + strengths[0] * g * (g * mu[j] - beta[j]) * p
    return torch.linalg.solve(x.T @ x + torch.diag(diagonal), right)


def by_newton(weights: UnitWeights, kept: Tensor, j: int, strengths: tuple[float, float]) -> Tensor:
    """The minimum by derivatives of the objective alone; two steps, the second for rounding."""

    def loss(s: Tensor) -> Tensor:
        return objective(weights, kept, j, s, strengths)

    s = torch.zeros(len(kept), dtype=torch.float64)
    for _ in range(2):
        gradient = torch.autograd.functional.jacobian(loss, s)
        s = s - torch.linalg.solve(torch.autograd.functional.hessian(loss, s), gradient)
    return s


def by_lbfgs(weights: UnitWeights, kept: Tensor, j: int, strengths: tuple[float, float]) -> Tensor:
    s = torch.zeros(len(kept), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [s],
        max_iter=2000,
        max_eval=10000,
        tolerance_grad=1e-13,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = objective(weights, kept, j, s, strengths)
        loss.backward()
        return loss

    search.step(closure)  # type: ignore[no-untyped-call]
    return s.detach()


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> bool:
    return float((found - wanted).norm()) <= tolerance * (1 + float(wanted.norm()))


LAYERS = st.sampled_from(
    [("chain", "0"), ("chain", "3"), ("basic", "conv1"), ("bottleneck", "conv2"), ("dense", "3")]
)


@given(LAYERS, st.integers(0, 10_000), STRENGTHS)
def test_theorem_is_the_minimum_of_the_published_objective(
    where: tuple[str, str], seed: int, strengths: tuple[float, float]
) -> None:
    weights = layer(*where, seed)
    kept = some_kept(weights.unit.channels, seed)
    found = lbyl.methods.LBYL(*strengths).deliver(weights, kept, None).matrix
    gone = pruned_of(weights.unit.channels, kept).tolist()
    for j in gone:
        assert close(found[j], direct_theorem(weights, kept, j, strengths))
        assert close(found[j], by_newton(weights, kept, j, strengths))
    assert torch.equal(found[kept], identity_rows(weights.unit.channels, kept, found)[kept])


@given(st.integers(0, 10_000), STRENGTHS)
def test_no_descent_leads_below_the_closed_form(seed: int, strengths: tuple[float, float]) -> None:
    weights = layer("chain", "0", seed)
    kept = some_kept(10, seed)
    j = int(pruned_of(10, kept)[seed % 5])
    s = lbyl.methods.LBYL(*strengths).deliver(weights, kept, None).matrix[j]
    searched = by_lbfgs(weights, kept, j, strengths)
    least = objective(weights, kept, j, searched, strengths)
    assert objective(weights, kept, j, s, strengths) <= least * (1 + 1e-9)
    assert close(s, searched)


@given(LAYERS, st.integers(0, 10_000), STRENGTHS)
def test_released_equals_its_dense_solve_filter_by_filter(
    where: tuple[str, str], seed: int, strengths: tuple[float, float]
) -> None:
    weights = layer(*where, seed)
    kept = some_kept(weights.unit.channels, seed)
    found = lbyl.methods.LBYL(*strengths, variant="released").deliver(weights, kept, None).matrix
    for j in pruned_of(weights.unit.channels, kept).tolist():
        assert close(found[j], direct_released(weights, kept, j, strengths))


@pytest.mark.parametrize("variant", ["theorem", "released"])
@pytest.mark.parametrize("strength", [1e-6, 0.3, 2.0])
def test_without_batchnorm_it_is_ridge_regression(variant: str, strength: float) -> None:
    weights = layer("dense", "0", 3)
    kept = some_kept(16, 3)
    rows = weights.filters_with_bias
    if variant == "released":  # an intercept: both sides centred over the entries
        rows = rows - rows.mean(1, keepdim=True)
    x = rows[kept].T
    found = lbyl.methods.LBYL(lambda2=strength, variant=variant).deliver(weights, kept, None).matrix
    for j in pruned_of(16, kept).tolist():
        # Ridge as ordinary least squares on rows added below: another way to the same numbers.
        below = strength**0.5 * torch.eye(len(kept), dtype=torch.float64)
        target = torch.cat([rows[j], torch.zeros(len(kept), dtype=torch.float64)])
        wanted = torch.linalg.lstsq(torch.cat([x, below]), target[:, None]).solution[:, 0]
        assert close(found[j], wanted)


def test_a_convolutions_bias_is_a_shift_of_the_running_mean() -> None:
    """The same network with its bias folded into μ by hand must be restored alike."""
    model = build("pooled", 5)
    folded = build("pooled", 5)
    with torch.no_grad():
        folded[1].running_mean -= folded[0].bias
        folded[0].bias.zero_()
    x = example("pooled")
    kept = some_kept(9, 5)
    for variant in ("theorem", "released"):
        method = lbyl.methods.LBYL(0.1, 0.01, variant)
        a, b = (
            method.deliver(unit_weights(lbyl.trace(m, x), m)["0"], kept, None).matrix
            for m in (model, folded)
        )
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # μ − b is rounded to float32


@pytest.mark.parametrize("options", [{"lambda1": -1.0}, {"lambda2": float("nan")}])
def test_strengths_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(lbyl.LbylError, match=next(iter(options))):
        lbyl.methods.LBYL(**options)


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(lbyl.LbylError, match=r"'paper'.*'theorem' or 'released'"):
        lbyl.methods.LBYL(variant="paper")


@pytest.mark.parametrize("variant", ["theorem", "released"])
@pytest.mark.parametrize("name", ["chain", "biased"])
def test_units_delivered_in_one_go_are_those_delivered_alone(name: str, variant: str) -> None:
    method = lbyl.methods.LBYL(variant=variant)
    layers = [layer(name, "0", seed) for seed in range(3)]
    units = [(w, some_kept(w.unit.channels, i)) for i, w in enumerate(layers)]
    assert len({method.alike(*unit) for unit in units}) == 1
    together = method.deliver_alike(units, None)
    for unit, found in zip(units, together, strict=True):
        alone = method.deliver(*unit, None)
        torch.testing.assert_close(found.matrix, alone.matrix, rtol=1e-9, atol=1e-10)
