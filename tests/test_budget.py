"""Budgets are met, sizes predicted are sizes measured, and nonsense is refused."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl import data, zoo
from lbyl.budget import Sizes, curves
from networks import build, example


@pytest.fixture(scope="module")
def digits() -> tuple[torch.nn.Module, torch.Tensor, lbyl.Graph, lbyl.Statistics]:
    model = zoo.create("digits", "shipped")
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    graph = lbyl.trace(model, x)
    return model, x, graph, lbyl.collect(model, x, graph=graph, images=256)


@pytest.mark.parametrize("share", [0.7, 0.4, 0.25])
def test_macs_and_parameters_keep_to_the_budget(digits, share: float) -> None:  # type: ignore[no-untyped-def]
    model, x, graph, statistics = digits
    by_macs = lbyl.compress(model, x, macs=share, graph=graph, statistics=statistics)
    assert 0.85 * share < by_macs.after.macs / by_macs.before.macs <= share
    by_size = lbyl.compress(model, x, params=share, graph=graph, statistics=statistics)
    assert 0.85 * share < by_size.after.parameters / by_size.before.parameters <= share * 1.01


def test_predicted_sizes_are_the_sizes_of_the_cut_network() -> None:
    for name in ("chain", "bottleneck", "basic"):
        model, x = build(name), example(name)
        graph = lbyl.trace(model, x)
        result = lbyl.compress(model, x, 0.4, method="none", graph=graph)
        counts = {n: len(k) for n, k in result.plan.kept.items()}
        assert Sizes(graph).macs(counts) == result.after.macs


def test_error_curves_rise_from_nothing(digits) -> None:  # type: ignore[no-untyped-def]
    model, x, graph, statistics = digits
    for curve in curves(model, x, graph, statistics).values():
        assert curve.error[0] == 0 and bool((curve.error.diff() >= 0).all())
        assert curve.error[-1] <= 1 and sorted(curve.order.tolist())[0] >= 0


def test_a_larger_error_allowed_removes_more(digits) -> None:  # type: ignore[no-untyped-def]
    model, x, graph, statistics = digits
    sizes = [
        lbyl.compress(model, x, max_error=e, graph=graph, statistics=statistics).after.parameters
        for e in (0.01, 0.05, 0.2)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_chosen_ratios_beat_uniform_ones_when_little_is_left(digits) -> None:  # type: ignore[no-untyped-def]
    model, x, graph, statistics = digits
    images = data.load("digits")
    given = {"graph": graph, "statistics": statistics, "criterion": "echo"}
    chosen = lbyl.compress(model, x, macs=0.25, **given)
    uniform = lbyl.compress(model, x, 0.7, **given)
    assert uniform.after.macs <= 0.25 * uniform.before.macs * 1.05
    assert data.evaluate("digits", chosen.model, images) > data.evaluate(
        "digits", uniform.model, images
    )


@pytest.mark.parametrize(
    "given", [{"macs": 0}, {"macs": 1.5}, {"params": -1}, {"macs": 0.5, "params": 0.5}]
)
def test_budgets_that_mean_nothing_are_refused(digits, given: dict[str, float]) -> None:  # type: ignore[no-untyped-def]
    model, x, graph, statistics = digits
    with pytest.raises(lbyl.LbylError, match=next(iter(given))):
        lbyl.compress(model, x, graph=graph, statistics=statistics, **given)


def test_a_budget_too_small_is_refused(digits) -> None:  # type: ignore[no-untyped-def]
    model, x, graph, statistics = digits
    with pytest.raises(lbyl.LbylError, match="cannot be met"):
        lbyl.compress(model, x, macs=0.001, graph=graph, statistics=statistics)


def test_estimates_order_the_methods(digits) -> None:  # type: ignore[no-untyped-def]
    model, x, graph, statistics = digits
    found = lbyl.estimate(model, x, (0.3, 0.5), graph=graph, statistics=statistics)
    assert len(found.rows) == len(graph) * 2 * 4 and "WARE" in str(found)
    ware = {(r.unit, r.ratio, r.method): r.ware for r in found.rows}
    for unit in graph.names:
        assert ware[unit, 0.3, "echo"] < ware[unit, 0.3, "none"]
        assert ware[unit, 0.3, "echo"] < ware[unit, 0.5, "echo"]
        # Nothing delivered loses each pruned channel whole.
        gone = next(r for r in found.rows if (r.unit, r.ratio, r.method) == (unit, 0.5, "none"))
        assert gone.ware == pytest.approx(1 - gone.kept / gone.channels)
