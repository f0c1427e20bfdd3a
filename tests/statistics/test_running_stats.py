"""Moments matched by what the BatchNorm behind a consumer remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lbyl
from lbyl.statistics.collect import collect_moments
from lbyl.statistics.moments import Moments
from lbyl.statistics.running_stats import (
    DAMPING,
    LIMITS,
    WIDER,
    Known,
    _by_inputs,
    _by_outputs,
    match_running_stats,
    matched_alike,
    with_diagonal,
)
from lbyl.torchkit.fallbacks import noting
from support import quick
from support.matching import copied, matched


def random_moments(features: int, seed: int = 0) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(features, 2 * features, dtype=torch.float64, generator=generator)
    mean = torch.randn(features, 1, dtype=torch.float64, generator=generator)
    return Moments(mean, root @ root.T / (2 * features))


def random_weight(outputs: int, features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(outputs, features, dtype=torch.float64, generator=generator)


def test_agreeing_moments_stay_as_they_are() -> None:
    moments, weight = random_moments(12), random_weight(5, 12)
    mean = weight @ moments.mean[:, 0]
    variance = ((weight @ moments.covariance) * weight).sum(1)
    found = matched(moments, weight, mean, variance)
    torch.testing.assert_close(found.covariance, moments.covariance)
    torch.testing.assert_close(found.mean, moments.mean)


def test_output_gets_the_remembered_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lbyl.statistics.running_stats.DAMPING", 1e-12)
    monkeypatch.setattr("lbyl.statistics.running_stats.SMOOTHING", 0.0)
    monkeypatch.setattr("lbyl.statistics.running_stats.STEPS", 12)
    moments, weight = random_moments(12), random_weight(5, 12)
    was = ((weight @ moments.covariance) * weight).sum(1)
    mean, variance = torch.arange(5).double(), was * torch.tensor([0.5, 1.0, 2.0, 0.8, 1.3])
    found = matched(moments, weight, mean, variance)
    torch.testing.assert_close(weight @ found.mean[:, 0], mean)
    torch.testing.assert_close(((weight @ found.covariance) * weight).sum(1), variance)


def test_what_the_output_does_not_tell_is_left_alone() -> None:
    """Given the output, the inputs vary as before: the conditional covariance is the same."""
    moments, weight = random_moments(8), random_weight(3, 8)
    variance = 2 * ((weight @ moments.covariance) * weight).sum(1)
    found = matched(moments, weight, weight @ moments.mean[:, 0], variance)

    def conditional(covariance: torch.Tensor) -> torch.Tensor:
        across = covariance @ weight.T
        return covariance - across @ torch.linalg.solve(weight @ across, across.T)

    torch.testing.assert_close(
        conditional(found.covariance), conditional(moments.covariance), atol=1e-9, rtol=0
    )


def test_both_ways_of_solving_agree() -> None:
    """As many outputs as inputs may be solved in terms of either."""
    moments, weight = random_moments(6), random_weight(6, 6)
    across = moments.covariance @ weight.T
    spread = (weight * across.T).sum(1)
    wanted = spread * torch.linspace(0.8, 1.25, 6, dtype=torch.float64)
    given = (wanted, torch.linspace(-1, 1, 6).double(), 1e-7 * spread.mean())
    first = _by_outputs(moments.covariance.clone(), weight, across, *given)[:2]
    second = _by_inputs(moments.covariance, weight, *given)[:2]
    assert first is not None and second is not None
    for one, other in zip(first, second):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("outputs", [3, 8, 40])
def test_covariance_stays_positive_and_comes_nearer(outputs: int) -> None:
    moments, weight = random_moments(8), random_weight(outputs, 8)
    was = ((weight @ moments.covariance) * weight).sum(1)
    wanted = was * torch.linspace(0.5, 2, outputs, dtype=torch.float64)
    found = matched(moments, weight, torch.zeros(outputs).double(), wanted)
    now = ((weight @ found.covariance) * weight).sum(1)
    assert torch.linalg.eigvalsh(found.covariance).min() > -1e-9
    assert (now / wanted).log().square().mean() < (was / wanted).log().square().mean()


def test_contradictory_running_statistics_do_no_harm() -> None:
    """Two equal outputs that remember variances a million apart."""
    moments = random_moments(6)
    weight = random_weight(1, 6).repeat(2, 1)
    found = matched(moments, weight, torch.zeros(2).double(), torch.tensor([1e-3, 1e3]).double())
    assert torch.isfinite(found.covariance).all()
    assert torch.linalg.eigvalsh(found.covariance).min() > -1e-9


def test_least_change_is_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """No covariance with the same diagonal is nearer: the gradient vanishes off the diagonal."""
    monkeypatch.setattr("lbyl.statistics.running_stats.SMOOTHING", 0.0)
    monkeypatch.setattr("lbyl.statistics.running_stats.STEPS", 12)
    matrix = random_moments(6).covariance
    diagonal = matrix.diagonal() * torch.tensor([0.6, 1.0, 1.5, 0.9, 2.0, 1.1])
    root = torch.linalg.cholesky(matrix)
    found = with_diagonal(root, root, diagonal)
    torch.testing.assert_close(found.diagonal(), diagonal)
    # KL(N(0, found) ‖ N(0, matrix)) has the gradient (matrix⁻¹ − found⁻¹)/2 in `found`.
    gradient = torch.linalg.inv(matrix) - torch.linalg.inv(found)
    rest = gradient - torch.diag(gradient.diagonal())
    assert rest.abs().max() < 1e-8


@pytest.mark.parametrize("outputs", [2, 9])
def test_covariances_that_rounding_made_indefinite_are_left_alone(outputs: int) -> None:
    moments = random_moments(4)
    covariance = moments.covariance - 2 * torch.linalg.eigvalsh(moments.covariance)[1] * torch.eye(
        4
    )
    weight = torch.cat(
        [1e-9 * random_weight(outputs - 1, 4), torch.linalg.eigh(covariance)[1].T[-1:]]
    )
    broken = Moments(moments.mean, covariance)
    found = matched(broken, weight, torch.zeros(outputs).double(), torch.ones(outputs).double())
    assert torch.isfinite(found.covariance).all() and torch.isfinite(found.mean).all()


def test_dead_outputs_teach_nothing() -> None:
    moments = random_moments(4)
    with noting() as notes:
        found = matched(moments, torch.zeros(3, 4).double(), torch.ones(3), torch.ones(3))
    assert found is moments and not list(notes)


def test_duplicates_still_restore_exactly_with_any_running_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(6 * 64, 4),
    ).eval()
    nn.init.uniform_(model[4].running_var, 0.2, 2.0)
    nn.init.uniform_(model[4].running_mean, -1.0, 1.0)
    with torch.no_grad():  # the second half repeats the first
        for tensor in (*model[0].parameters(), *model[1].parameters()):
            tensor[4:] = tensor[:4]
        model[0].weight[4:] *= 0.5  # the criterion takes the copies
        model[1].running_var[4:] = model[1].running_var[:4] * 0.25
        model[1].running_mean[4:] = model[1].running_mean[:4] * 0.5
        model[0].bias[4:] *= 0.5
    model[1].eps = 1e-12
    x = torch.randn(2, 3, 8, 8)
    slim = lbyl.compress(model, x, 0.5, include="0", method=lbyl.methods.Echo(ridge=0)).model
    torch.testing.assert_close(slim(x), model(x), atol=1e-4, rtol=1e-4)


def test_procedural_images_alone_are_matched_to_running_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6)
    ).eval()
    nn.init.constant_(model[4].running_var, 0.3)
    x = torch.zeros(1, 3, 16, 16)
    graph = lbyl.trace(model, x)
    prepared = lbyl.prepare(model, x)
    plain = collect_moments(model, graph, prepared.fresh.collection())
    found = prepared.statistics()
    assert not torch.allclose(found.moments["3"].covariance, plain.moments["3"].covariance)
    torch.testing.assert_close(
        found.moments["3"].covariance,
        match_running_stats(model, graph, plain).moments["3"].covariance,
    )
    images = torch.randn(64, 3, 16, 16)
    measured = quick.own_statistics(model, x, images).moments["3"]
    with torch.no_grad():
        seen = model[:3](images).mean((0, 2, 3)).double()
    torch.testing.assert_close(measured.mean.mean(1), seen, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("outputs", [3, 9])
def test_inputs_that_are_copies_of_each_other_are_matched(outputs: int) -> None:
    """A covariance without full rank: rounding may leave an eigenvalue just below zero."""
    whole, weight = random_moments(4), random_weight(outputs, 8)
    moments = Moments(whole.mean.repeat(2, 1), whole.covariance.repeat(2, 2))
    was = ((weight @ moments.covariance) * weight).sum(1)
    mean = weight @ moments.mean[:, 0]
    found = matched(moments, weight, mean, 1.5 * was)
    now = ((weight @ found.covariance) * weight).sum(1)
    torch.testing.assert_close(now, 1.5 * was, rtol=0.02, atol=0)
    torch.testing.assert_close(found.covariance, 1.5 * moments.covariance, rtol=0, atol=0.05 * 4)
    torch.testing.assert_close(found.mean, moments.mean)


@pytest.mark.parametrize("outputs", [4, 5, 6, 20])
def test_means_move_by_the_regression_of_inputs_on_outputs(outputs: int) -> None:
    moments, weight = random_moments(5), random_weight(outputs, 5)
    across = moments.covariance @ weight.T
    was = (weight * across.T).sum(1)
    gap = torch.linspace(-1, 2, outputs).double()
    found = matched(moments, weight, weight @ moments.mean[:, 0] + gap, was)
    inner = weight @ across + DAMPING * was.mean() * torch.eye(outputs).double()
    expected = moments.mean[:, 0] + across @ torch.linalg.solve(inner, gap)
    torch.testing.assert_close(found.mean[:, 0], expected, rtol=1e-3, atol=1e-3)
    assert found.mean.shape == moments.mean.shape


@pytest.mark.parametrize("factor", [1e-9, 0.3, 0.8, 3.0, 1e9])
def test_one_output_moves_within_limits(factor: float) -> None:
    moments, weight = random_moments(6), random_weight(1, 6)
    was = ((weight @ moments.covariance) * weight).sum(1)
    found = matched(moments, weight, weight @ moments.mean[:, 0], factor * was)
    now = ((weight @ found.covariance) * weight).sum(1)
    allowed = min(max(factor, LIMITS[0]), LIMITS[1])
    expected = 1 + (allowed - 1) / (1 + DAMPING) ** 2
    assert float(now / was) == pytest.approx(expected, rel=0.003)


def test_a_dead_output_among_others_is_asked_nothing() -> None:
    for outputs in (3, 9):
        moments, weight = random_moments(6), random_weight(outputs, 6)
        weight[1] = 1e-9
        was = ((weight @ moments.covariance) * weight).sum(1)
        target = torch.where(was > 1e-6 * was.mean(), was, 1e3)
        found = matched(moments, weight, weight @ moments.mean[:, 0], target)
        torch.testing.assert_close(found.covariance, moments.covariance, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [3, 9])
@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_units_of_measurement_do_not_matter(outputs: int, scale: float) -> None:
    moments, weight = random_moments(5), random_weight(outputs, 5)
    was = ((weight @ moments.covariance) * weight).sum(1)
    mean, variance = torch.linspace(-1, 1, outputs).double(), 0.7 * was
    found = matched(moments, weight, mean, variance)
    larger = Moments(scale * moments.mean, scale**2 * moments.covariance)
    again = matched(larger, weight, scale * mean, scale**2 * variance)
    torch.testing.assert_close(again.mean / scale, found.mean)
    torch.testing.assert_close(again.covariance / scale**2, found.covariance)
    assert not torch.allclose(found.covariance, moments.covariance, rtol=0.05)


@pytest.mark.parametrize("outputs", [3, 6, 9])
def test_consumers_matched_in_one_go_are_those_matched_one_by_one(outputs: int) -> None:
    """Also where one has nothing to match, one a dead output, and one cannot be satisfied."""
    several = []
    for i in range(6):
        torch.manual_seed(i)
        moments, weight = random_moments(6), random_weight(outputs, 6)
        if i == 1:
            weight = torch.zeros_like(weight)
        if i == 2:
            weight[1] = 0
        variance = torch.linspace(0.1, 3, outputs).double() * (1000.0**i if i > 3 else 1)
        if i == 4:
            weight = weight[:1].repeat(outputs, 1)
            variance[::2] *= 1e-3
        several.append(Known(moments, weight, torch.linspace(-1, 1, outputs).double(), variance))
    singly = [matched_alike([replace(one, moments=copied(one.moments))])[0] for one in several]
    for alone, new in zip(singly, matched_alike(several)):
        assert new is not None and alone is not None
        torch.testing.assert_close(new.mean, alone.mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(new.covariance, alone.covariance, rtol=1e-9, atol=1e-12)


def test_one_that_cannot_be_matched_leaves_the_others_alone() -> None:
    good, bad = random_moments(6), random_moments(6)
    bad = Moments(bad.mean, torch.diag(torch.tensor([100.0, -1, -1, 1, 1, 1]).double()))
    given = torch.eye(3, 6).double(), torch.zeros(3).double(), torch.ones(3).double()
    alone, was = matched(good, *given), bad.covariance.clone()
    one, other = matched_alike([Known(good, *given), Known(bad, *given)])
    assert one is not None and other is None
    torch.testing.assert_close(one.covariance, alone.covariance)
    assert matched_alike([Known(bad, *given)]) == [None]
    assert torch.equal(bad.covariance, was)  # what cannot be matched is not touched


def test_new_covariances_are_held_where_the_old_ones_were() -> None:
    moments, weight = random_moments(12), random_weight(3, 12)
    given = weight, torch.ones(3).double(), torch.full((3,), 2.0).double()
    held, wanted = moments.covariance, matched(moments, *given).covariance
    (new,) = matched_alike([Known(moments, *given)])
    assert new is not None and new.covariance is held
    torch.testing.assert_close(held, wanted)


@pytest.mark.parametrize("outputs", [1, 3, 4, 14])
def test_products_with_the_weight_come_along_where_they_are_small(outputs: int) -> None:
    moments, weight = random_moments(12), random_weight(outputs, 12)
    found = matched(moments, weight, torch.ones(outputs).double(), torch.ones(outputs).double())
    if outputs > 12 / WIDER:
        assert found.mixed is None
    else:
        torch.testing.assert_close(found.mixed, weight @ found.covariance, rtol=1e-10, atol=1e-12)
