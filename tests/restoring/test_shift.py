"""How far a consumer's output moves, and when a new weight is worse than nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lbyl.graph.unit import Consumer, Norm
from lbyl.restoring.correct import (
    VARIANCE_LIMITS,
    Shift,
    corrected_values,
    is_worse_than_cut,
    output_shift,
    scaled_variance,
)
from lbyl.statistics.moments import Moments

KEPT = torch.tensor([True, False, True, True, False])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def seen() -> tuple[Tensor, Moments]:
    rows = 0.5 + drawn(80, 5) @ drawn(5, 5, seed=1)
    return rows, Moments(rows.mean(0)[:, None], torch.cov(rows.T, correction=0))


def test_shifts_are_those_of_the_samples() -> None:
    rows, moments = seen()
    old = drawn(4, 5, 1, seed=2)
    new = old[:, KEPT] + 0.2 * drawn(4, 3, 1, seed=3)
    was, now = rows @ old[..., 0].T, rows[:, KEPT] @ new[..., 0].T
    shift = output_shift(moments, old, new, KEPT)
    variances = [made.var(0, correction=0) for made in (was, now, now - was)]
    torch.testing.assert_close(shift.mean, now.mean(0) - was.mean(0))
    torch.testing.assert_close(
        shift.variance, (variances[1] / variances[0]).clamp(*VARIANCE_LIMITS)
    )
    torch.testing.assert_close(shift.total, variances[0].sum())
    torch.testing.assert_close(shift.error, variances[2].sum() / variances[0].sum())


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.5, 100.0])
def test_variances_change_within_limits(factor: float) -> None:
    _, moments = seen()
    every, old = torch.ones(5).bool(), drawn(3, 5, 1, seed=2)
    shift = output_shift(moments, old, factor * old, every)
    expected = min(max(factor**2, VARIANCE_LIMITS[0]), VARIANCE_LIMITS[1])
    assert shift.variance.tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
def test_outputs_that_never_vary_keep_their_variance(scale: float) -> None:
    _, moments = seen()
    old = scale * drawn(4, 5, 1, seed=2)
    old[1] = 0
    old[2] *= 1e-8  # its variance is nothing beside the others'
    new = 1.2 * old[:, KEPT]
    shift = output_shift(moments, old, new, KEPT)
    assert shift.variance[[1, 2]].tolist() == [1, 1]
    assert bool((shift.variance[[0, 3]] != 1).all()) and bool(shift.error.isfinite())
    nothing = output_shift(moments, 0 * old, 0 * new, KEPT)
    assert nothing.variance.tolist() == [1] * 4 and float(nothing.error) == 0


def test_columns_behind_a_flatten_are_regrouped_before() -> None:
    """Two channels of three columns each: the same as with taps that are served alike."""
    columns = torch.tensor([[0, 2, 4], [1, 3, 5]])
    covariance, mean = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), drawn(2, 1)
    spatial = torch.corrcoef(drawn(9, 3, seed=3).T)
    flat = Moments(mean, covariance, 1, spatial, columns)
    plain = Moments(mean, covariance, 1, spatial)
    old = drawn(4, 6, 1, seed=4)
    kept = torch.tensor([False, True] * 3)
    new = old[:, kept] * 1.3
    found = output_shift(flat, old, new, kept)
    regrouped = old[:, columns.flatten(), 0].unflatten(1, (2, 3))
    wanted = output_shift(plain, regrouped, 1.3 * regrouped[:, 1:], torch.tensor([False, True]))
    for name in ("mean", "variance", "error", "total"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))


def test_a_weight_is_worse_where_it_errs_by_more_than_the_pruned_inputs_carried() -> None:
    rows, moments = seen()
    old = drawn(4, 5, 1, seed=2)
    cut = old[:, KEPT]
    carried = (rows[:, ~KEPT] @ old[:, ~KEPT, 0].T).var(0, correction=0).sum()
    whole = output_shift(moments, old, cut, KEPT)
    torch.testing.assert_close(whole.error * whole.total, carried)
    for factor, worse in ((0.5, False), (1.0, False), (1.009, False), (1.011, True), (3.0, True)):
        shift = Shift(whole.mean, whole.variance, factor * whole.error, whole.total)
        assert is_worse_than_cut(moments, old, KEPT, shift) == worse
    # Where nothing was carried, a billionth of the output is rounding.
    old[:, ~KEPT] = 0
    for error, worse in ((0.5e-9, False), (2e-9, True)):
        shift = Shift(whole.mean, whole.variance, torch.tensor(error), whole.total)
        assert is_worse_than_cut(moments, old, KEPT, shift) == worse


def test_what_cannot_be_told_is_not_called_worse() -> None:
    _, moments = seen()
    broken = Moments(moments.mean, moments.covariance * torch.inf)
    shift = Shift(torch.zeros(4), torch.ones(4), torch.tensor(9.0), torch.tensor(1.0))
    assert not is_worse_than_cut(broken, drawn(4, 5, 1), KEPT, shift)
    unknown = Shift(shift.mean, shift.variance, torch.tensor(torch.nan), shift.total)
    assert is_worse_than_cut(moments, drawn(4, 5, 1), KEPT, unknown)


def test_what_batchnorm_divides_by_is_scaled_and_never_negative() -> None:
    variance, factor = torch.tensor([1.0, 0.0, 2.0]).double(), torch.tensor([2.0, 3.0, 0.01])
    found = scaled_variance(variance, 0.1, factor.double())
    assert found.tolist() == pytest.approx([2.1, 0.2, 0.0])


@pytest.mark.parametrize("correction", ["none", "mean", "mean+variance", "recalibrate"])
def test_each_correction_writes_its_part(correction: str) -> None:
    norm = Norm("n", "n.mean", "n.var", "n.weight", "n.bias", 0.25, 0, 0)
    state = {"n.mean": torch.ones(2), "n.var": torch.tensor([1.0, 3.0]), "l.bias": torch.ones(2)}
    shift = Shift(torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.5]), *torch.ones(2))
    behind = Consumer("l", "l.weight", "l.bias", 1, 0, norm, "linear", torch.arange(3))
    alone = Consumer("l", "l.weight", "l.bias", 1, 0, None, "linear", torch.arange(3))
    found = corrected_values(behind, shift, state, correction, True)
    expected = {}
    if correction != "none":
        expected["n.mean"] = [1.5, 0.0]
    if correction in ("mean+variance", "recalibrate"):
        expected["n.var"] = [2.25, 1.375]
    assert {name: value.tolist() for name, value in found.items()} == expected
    found = corrected_values(alone, shift, state, correction, False)
    assert {name: value.tolist() for name, value in found.items()} == (
        {} if correction == "none" else {"l.bias": [0.5, 2.0]}
    )
