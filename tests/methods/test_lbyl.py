"""`lbyl`: what the reader gets, against the published objective, minimised directly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lbyl
from support.delivery import Layer, close, layer, some_kept

LBYL = lbyl.methods.LBYL
STRENGTHS = [(1e-5, 2e-3), (0.0, 0.1), (1.0, 1e-3), (0.03, 1.0), (5.0, 0.5)]
LAYERS = [("conv", 0, 10), ("conv", 1, 9), ("linear", 2, 8), ("conv", 3, 72)]


def objective(of: Layer, kept: Tensor, j: int, s: Tensor, strengths: tuple[float, float]) -> Tensor:
    """‖y − Xs‖² + λ₁(γ_j/σ_j)²(pᵀs − μ_j + σ_jβ_j/γ_j)² + λ₂‖s‖², term by term."""
    f, (gamma, beta, mu, _, sigma) = of.filters, of.norm
    kappa = sigma[j] * gamma[kept] / (gamma[j] * sigma[kept])
    p = kappa * (mu[kept] - sigma[kept] * beta[kept] / gamma[kept])
    residual = f[j] - (kappa[:, None] * f[kept]).T @ s
    constant = p @ s - mu[j] + sigma[j] * beta[j] / gamma[j]
    weight = strengths[0] * (gamma[j] / sigma[j]) ** 2
    return residual @ residual + weight * constant**2 + strengths[1] * s @ s


def least(of: Layer, kept: Tensor, j: int, strengths: tuple[float, float]) -> Tensor:
    """The minimum by derivatives of the objective alone; two steps, the second for rounding."""

    def loss(s: Tensor) -> Tensor:
        return objective(of, kept, j, s, strengths)

    s = torch.zeros(len(kept), dtype=torch.float64)
    for _ in range(2):
        gradient = torch.autograd.functional.jacobian(loss, s)
        s = s - torch.linalg.solve(torch.autograd.functional.hessian(loss, s), gradient)
    return s


def released(of: Layer, kept: Tensor, j: int, strengths: tuple[float, float]) -> Tensor:
    """The public code's system, where σ is the running variance and no γ is below a millionth."""
    f, (given, beta, mu, sigma, _) = of.filters, of.norm
    off = given.abs() < 1e-6
    gamma = torch.where(off, 1e-6, given)
    p = torch.where(off, 0.0, mu - sigma * beta / gamma)[kept]
    x, g = f[kept].T, given[j] / sigma[j]
    k = g * sigma[kept] / gamma[kept]
    matrix = x.T @ x + torch.diag(strengths[0] * g**2 * (p @ p) + strengths[1] * k**2)
    right = x.T @ f[j] + strengths[0] * g * (g * mu[j] - beta[j]) * p
    return torch.linalg.solve(matrix, right)


@pytest.mark.parametrize("strengths", STRENGTHS)
@pytest.mark.parametrize("where", LAYERS, ids=str)
def test_theorem_is_the_minimum_of_the_published_objective(
    where: tuple[str, int, int], strengths: tuple[float, float]
) -> None:
    of = layer(*where)
    kept, gone = some_kept(of.channels, where[1])
    found = of.delivered(kept, LBYL(*strengths))
    for j in gone[:6].tolist():
        close(found[j], least(of, kept, j, strengths), 1e-7)
    close(found[kept], torch.eye(len(kept)).double())


@pytest.mark.parametrize("strengths", STRENGTHS)
@pytest.mark.parametrize("where", LAYERS, ids=str)
def test_released_equals_its_dense_solve_filter_by_filter(
    where: tuple[str, int, int], strengths: tuple[float, float]
) -> None:
    of = layer(*where)
    kept, gone = some_kept(of.channels, where[1])
    with torch.no_grad():
        of.model[1].weight[kept[0]] = 5e-7
    found = of.delivered(kept, LBYL(*strengths, variant="released"))
    for j in gone[:6].tolist():
        close(found[j], released(of, kept, j, strengths), 1e-6)


@pytest.mark.parametrize("variant", ["theorem", "released"])
@pytest.mark.parametrize("strength", [1e-6, 0.3, 2.0])
@pytest.mark.parametrize("kind", ["bare linear", "bare conv"])
def test_without_batchnorm_it_is_ridge_regression(kind: str, variant: str, strength: float) -> None:
    of = layer(kind, 4)
    kept, gone = some_kept(10)
    rows = of.rows
    if variant == "released":  # an intercept: both sides centred over the entries
        rows = rows - rows.mean(1, keepdim=True)
    # Ridge as ordinary least squares on rows added below: another way to the same numbers.
    below = strength**0.5 * torch.eye(5, dtype=torch.float64)
    left = torch.cat([rows[kept].T, below])
    right = torch.cat([rows[gone].T, torch.zeros(5, 5, dtype=torch.float64)])
    wanted = torch.linalg.lstsq(left, right).solution.T
    close(of.delivered(kept, LBYL(lambda2=strength, variant=variant))[gone], wanted)


@pytest.mark.parametrize("kind", ["bare linear", "conv"])
@pytest.mark.parametrize("size", [1e-90, 1.0, 1e90])
def test_of_kept_filters_that_repeat_each_other_each_delivers_its_share(
    kind: str, size: float
) -> None:
    """Without a ridge the system is singular: the shortest solution is taken, at any scale."""
    of = layer(kind, 1)
    kept, gone = torch.arange(5), torch.arange(5, 10)
    with torch.no_grad():
        for tensor in [*of.model[0].parameters(), *of.model[1].state_dict().values()]:
            if tensor.dim():
                tensor[3:5] = tensor[1:3]
        if kind == "bare linear":
            for parameter in of.model[0].parameters():
                parameter.mul_(size)
    found = of.delivered(kept, LBYL(0.0, 0.0))
    rows = of.rows / size
    if kind == "conv":
        gamma, *_, sigma = of.norm
        rows = of.filters * (gamma / sigma)[:, None]
    wanted = torch.linalg.lstsq(rows[kept].T, rows[gone].T, driver="gelsd").solution.T
    if kind == "bare linear" or size == 1:
        close(found[gone], wanted, 1e-6)
        close(found[gone, 1:3], found[gone, 3:5], 1e-6)


def test_a_switched_off_filter_delivers_nothing_beside_its_constant() -> None:
    """γ = 0: what is left of the objective, times γ², has no residual and no ridge."""
    of = layer()
    with torch.no_grad():
        of.model[1].weight[5:] = 0
    found = of.delivered(torch.arange(5), LBYL())
    close(found[5:], torch.zeros(5, 5).double())


def test_a_gram_matrix_that_cannot_be_decomposed_delivers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]

    of, kept = layer(), torch.arange(5)
    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "eigh", fails)
        result = of.cut(kept, "lbyl")
    assert any("nothing is delivered" in line for line in result.fallbacks)
    close(result.model[3].weight[:, :, 0].detach(), torch.eye(10).double()[:, :5])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lambda1": -1.0}, "lambda1"),
        ({"lambda2": float("nan")}, "lambda2"),
        ({"lambda2": float("inf")}, "lambda2"),
        ({"variant": "paper"}, r"'paper'.*'theorem' or 'released'"),
        ({"correction": "wonder"}, "unknown correction 'wonder'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(lbyl.LbylError, match=said):
        LBYL(**options)  # type: ignore[arg-type]
