"""RE, BE and ‖s‖ against the paper's formulas, filter by filter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lbyl
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.methods.base import identity_rows
from lbyl.restoring.error_terms import ErrorTerms, error_terms
from support.networks import build, example


def layer(name: str, unit: str, seed: int) -> UnitWeights:
    model = build(name, seed)
    return unit_weights(lbyl.trace(model, example(name)), model)[unit]


@given(st.integers(0, 1000))
def test_behind_batchnorm(seed: int) -> None:
    weights = layer("chain", "0", seed)
    kept, gone = [0, 1, 4, 8], [2, 3, 5, 6, 7, 9]
    matrix = torch.randn(10, 4, dtype=torch.float64)
    n = weights.norm
    assert n is not None
    residuals, biases = [], []
    for j in gone:
        kappa = [n.sigma[j] * n.gamma[k] / (n.gamma[j] * n.sigma[k]) for k in kept]
        mixture = sum(s * c * weights.filters[k] for s, c, k in zip(matrix[j], kappa, kept))
        residuals.append(float((weights.filters[j] - mixture).norm()))
        p = [float(n.gamma[i] * n.mean[i] / n.sigma[i] - n.beta[i]) for i in range(10)]
        biases.append(abs(sum(float(s) * p[k] for s, k in zip(matrix[j], kept)) - p[j]))
    found = error_terms(weights, torch.tensor(kept), matrix)
    assert found.residual == pytest.approx(sum(residuals) / 6, rel=1e-9)
    assert found.bias == pytest.approx(sum(biases) / 6, rel=1e-9)
    assert found.norm == pytest.approx(float(matrix[gone].norm(dim=1).mean()), rel=1e-9)


def test_without_batchnorm_the_bias_is_part_of_the_filter() -> None:
    weights = layer("dense", "0", 2)
    kept = torch.arange(9)
    matrix = torch.randn(16, 9, dtype=torch.float64)
    rows = weights.filters_with_bias
    wanted = float((rows[9:] - matrix[9:] @ rows[:9]).norm(dim=1).mean())
    found = error_terms(weights, kept, matrix)
    assert (found.residual, found.bias) == (pytest.approx(wanted), 0.0)


def test_the_theorem_trades_the_errors_as_its_weights_say() -> None:
    """A larger λ₁ buys a smaller BE, a larger λ₂ a smaller ‖s‖, each at the cost of RE."""
    weights = layer("chain", "0", 3)
    kept = torch.arange(5)

    def measured(lambda1: float, lambda2: float) -> tuple[float, float, float]:
        found = error_terms(
            weights, kept, lbyl.methods.LBYL(lambda1, lambda2).deliver(weights, kept, None).matrix
        )
        return found.residual, found.bias, found.norm

    plain, biased, short = measured(0, 1e-6), measured(100, 1e-6), measured(0, 10)
    assert biased[1] < plain[1] and biased[0] > plain[0]
    assert short[2] < plain[2] and short[0] > plain[0]


def test_nothing_pruned_has_no_error_and_switched_off_filters_count_as_none() -> None:
    weights = layer("chain", "0", 3)
    whole = identity_rows(10, torch.arange(10), weights.filters)
    assert error_terms(weights, torch.arange(10), whole) == ErrorTerms(0.0, 0.0, 0.0)
    model = build("chain", 3)
    with torch.no_grad():
        model[1].weight[5:] = 0.0
    weights = unit_weights(lbyl.trace(model, example("chain")), model)["0"]
    matrix = identity_rows(10, torch.arange(5), weights.filters)
    assert error_terms(weights, torch.arange(5), matrix).residual == 0.0


def test_the_report_holds_them() -> None:
    model, x = build("chain", 3), example("chain")
    result = lbyl.compress(model, x, 0.5, method="lbyl")
    weights = unit_weights(result.graph, model)
    for row in result.rows:
        kept = result.plan.kept[row.unit]
        matrix = lbyl.methods.LBYL().deliver(weights[row.unit], kept, None).matrix
        wanted = error_terms(weights[row.unit], kept, matrix)
        assert (row.residual, row.bias, row.norm) == (wanted.residual, wanted.bias, wanted.norm)
        assert row.residual > 0
