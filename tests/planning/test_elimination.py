"""Backward elimination against the definition: refit after every removal, by brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.graph.weights import unit_weights
from lbyl.planning.elimination import (
    BLOCK,
    ConsumerView,
    EchoCriterion,
    _indefinite_inverse,
    _inverses,
    consumer_view,
    eliminate,
    eliminate_together,
)
from lbyl.statistics.moments import Statistics
from lbyl.statistics.solve import RIDGE
from support import quick
from support.networks import build, example


def error_after(found: ConsumerView, gone: list[int], ridge: float) -> float:
    """Squared error at the readers when `gone` are refitted on the rest, ridge included."""
    size = len(found.covariance)
    epsilon = ridge * found.covariance.diagonal().mean()
    full = found.covariance + epsilon * torch.eye(size, dtype=torch.float64)
    stay = [i for i in range(size) if i not in gone]
    cross = full[gone][:, stay]
    left = full[gone][:, gone] - cross @ torch.linalg.solve(full[stay][:, stay], cross.T)
    return float((found.weight[gone][:, gone] * left).sum())


def random_view(size: int, seed: int) -> ConsumerView:
    generator = torch.Generator().manual_seed(seed)

    def gram() -> Tensor:
        rows = torch.randn(3 * size, size, generator=generator, dtype=torch.float64)
        return rows.T @ rows

    return ConsumerView(gram(), gram())


@pytest.mark.parametrize("seed", range(3))
def test_costs_add_up_to_the_error_of_refitting(seed: int) -> None:
    found = random_view(8, seed)
    gone: list[int] = []
    total = 0.0
    for j, cost in eliminate(found, torch.ones(8, dtype=torch.float64), ridge=0.01):
        best = min(error_after(found, [*gone, i], 0.01) for i in range(8) if i not in gone)
        gone.append(j)
        total += cost
        assert total == pytest.approx(error_after(found, gone, 0.01), rel=1e-8)
        assert error_after(found, gone, 0.01) == pytest.approx(best, rel=1e-8)
    assert len(set(gone)) == 7


def test_importance_moves_a_channel_to_the_end() -> None:
    found = random_view(6, 1)
    first = next(iter(eliminate(found, torch.ones(6, dtype=torch.float64))))[0]
    importance = torch.ones(6, dtype=torch.float64)
    importance[first] = 1e9
    assert first not in [j for j, _ in eliminate(found, importance)]


def test_a_duplicate_goes_first_and_for_nothing() -> None:
    model, x = build("chain", 0), example("chain")
    graph = lbyl.trace(model, x)
    unit = graph.units[0]
    with torch.no_grad():
        for name, axis in graph.axes:
            if name in dict(model.named_parameters()) | dict(model.named_buffers()):
                channel = graph.axes[name, axis]
                if axis == 0 and bool((channel == unit.start).any()):
                    tensor = dict(model.named_parameters()) | dict(model.named_buffers())
                    tensor[name][1] = tensor[name][0]
    weights = unit_weights(graph, model)[unit.name]
    statistics = quick.statistics(model, x, 64)
    order = EchoCriterion(power=0.0).order(weights, statistics)
    found = consumer_view(weights, statistics)
    assert found is not None
    assert order[0][0] in (0, 1)
    total = float((found.weight * found.covariance).sum())
    assert order[0][1] < 0.02 * total


def test_blocks_of_removals_give_the_order_of_single_ones() -> None:
    """More channels than a block holds, against the same removals applied one by one."""
    size = 2 * BLOCK + 5
    mixing = torch.randn(size, size, dtype=torch.float64)
    samples = torch.randn(3 * size, size, dtype=torch.float64) @ mixing
    rows = torch.randn(size, size, dtype=torch.float64)
    view = ConsumerView(samples.T @ samples / len(samples), rows.T @ rows)
    importance = torch.rand(size, dtype=torch.float64)
    epsilon = RIDGE * view.covariance.diagonal().mean()
    inverse = torch.linalg.inv(view.covariance + epsilon * torch.eye(size, dtype=torch.float64))
    gram, left = view.weight.clone(), torch.ones(size, dtype=torch.bool)
    for channel, cost in eliminate(view, importance):
        costs = gram.diagonal() / inverse.diagonal()
        expected = int((importance * costs).masked_fill(~left, torch.inf).argmin())
        assert channel == expected
        torch.testing.assert_close(cost, float(costs[channel]), rtol=1e-8, atol=0.0)
        kept_part = inverse[channel] / inverse[channel, channel]
        column = gram[:, channel].clone()
        gram -= torch.outer(kept_part, column) + torch.outer(column, kept_part)
        gram += column[channel] * torch.outer(kept_part, kept_part)
        inverse -= torch.outer(inverse[channel], kept_part)
        inverse[channel, channel], left[channel] = 1.0, False


def test_every_channel_is_named_once_even_where_costs_are_no_numbers() -> None:
    nothing = torch.zeros(70, 70, dtype=torch.float64)
    order = eliminate(ConsumerView(nothing, nothing), torch.ones(70, dtype=torch.float64))
    assert len({channel for channel, _ in order}) == 69


def test_units_worked_out_together_have_the_orders_they_have_alone() -> None:
    sizes = (BLOCK + 7, BLOCK + 7, BLOCK, 5, 1)
    views = [random_view(size, seed) for seed, size in enumerate(sizes)]
    views.append(ConsumerView(torch.zeros_like(views[0].covariance), views[0].weight))
    generator = torch.Generator().manual_seed(0)
    importances = [torch.rand(len(v.weight), generator=generator).double() for v in views]
    for view, importance, order in zip(
        views, importances, eliminate_together(views, importances), strict=True
    ):
        alone = eliminate(view, importance)
        assert [j for j, _ in order] == [j for j, _ in alone]
        assert [c for _, c in order] == pytest.approx([c for _, c in alone], rel=1e-6)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_norm_of_a_filter_counts_only_where_batchnorm_makes_it_free(normalised: bool) -> None:
    norm = nn.BatchNorm1d(12) if normalised else nn.Identity()
    model = nn.Sequential(nn.Linear(6, 12), norm, nn.ReLU(), nn.Linear(12, 4)).eval()
    with torch.no_grad():
        model[0].weight *= torch.logspace(-1, 1, 12)[:, None]
    x = torch.randn(64, 6)
    weights = unit_weights(lbyl.trace(model, x), model)["0"]
    statistics = lbyl.prepare(model, x, data=x).statistics()
    orders = [[j for j, _ in EchoCriterion(p).order(weights, statistics)] for p in (0.0, 4.0)]
    assert (orders[0] != orders[1]) == normalised


def test_where_nothing_is_measured_the_norm_decides() -> None:
    model, x = build("chain", 0), example("chain")
    weights = unit_weights(lbyl.trace(model, x), model)["0"]
    nothing = Statistics({})
    order = EchoCriterion().order(weights, nothing)
    ranked = weights.filters.norm(dim=1).argsort().tolist()
    assert order == [(j, 0.0) for j in ranked[:-1]]
    kept = EchoCriterion().select(weights, 3, nothing)
    assert kept.tolist() == sorted(ranked[-3:])
    assert EchoCriterion().select(weights, 1, nothing).tolist() == ranked[-1:]
    with pytest.raises(lbyl.LbylError, match="needs statistics"):
        EchoCriterion().select(weights, 3, None)


def test_views_add_up_consumers_and_taps() -> None:
    """Two consumers of one unit: what both multiply counts, the first one's covariance."""
    model = build("chain", 0)
    prepared = lbyl.prepare(model, example("chain"), data=32)
    weights = unit_weights(prepared.graph, model)["0"]
    measured = prepared.statistics()
    found = consumer_view(weights, measured)
    assert found is not None
    rows = model[3].weight.detach().double()  # (o, m, 3, 3)
    torch.testing.assert_close(found.weight, torch.einsum("omkl,onkl->mn", rows, rows))
    _, covariance = measured.moments["3"].channel_level()
    assert torch.equal(found.covariance, covariance)
    assert consumer_view(weights, Statistics({})) is None
    unit = replace(weights.unit, consumers=("3", "3"))
    twice = consumer_view(replace(weights, unit=unit), measured)
    assert twice is not None and torch.equal(twice.covariance, found.covariance)
    torch.testing.assert_close(twice.weight, 2 * found.weight)


def test_norms_weigh_by_their_fourth_power() -> None:
    norm = nn.BatchNorm1d(5)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), norm, nn.ReLU(), nn.Linear(5, 4)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([1.0, 1.1, 0.5, 0.9, 1.2])))
    x = torch.randn(64, 5)
    weights = unit_weights(lbyl.trace(model, x), model)["0"]
    measured = lbyl.prepare(model, x, data=x).statistics()
    view = consumer_view(weights, measured)
    assert view is not None
    norms = weights.criterion_filters.norm(dim=1)
    expected = eliminate(view, (norms / norms.max()) ** 4)
    assert EchoCriterion().order(weights, measured) == expected
    assert EchoCriterion(2.0).order(weights, measured) == eliminate(
        view, norms**2 / norms.max() ** 2
    )


@pytest.mark.parametrize("ridge", [0.01, 0.3])
def test_an_indefinite_covariance_is_inverted_in_its_positive_part(ridge: float) -> None:
    vectors = torch.linalg.qr(random_view(4, 0).covariance)[0]
    values = torch.tensor([3.0, 2.0, 1.0, -2.0]).double()
    broken = vectors @ torch.diag(values) @ vectors.T
    whole = random_view(4, 1).covariance
    found = _inverses(torch.stack([whole, broken]), ridge)
    eye = torch.eye(4).double()
    torch.testing.assert_close(
        found[0], torch.linalg.inv(whole + ridge * whole.diagonal().mean() * eye)
    )
    positive = values.clamp(min=0) + ridge * 1.5
    torch.testing.assert_close(found[1], vectors @ torch.diag(1 / positive) @ vectors.T)
    assert torch.equal(
        _indefinite_inverse(torch.full((2, 2), torch.nan).double(), ridge), eye[:2, :2]
    )
