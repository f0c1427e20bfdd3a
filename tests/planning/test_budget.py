"""Budgets are met, sizes predicted are sizes measured, and nonsense is refused."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl import data
from lbyl.models import zoo
from lbyl.planning.budget import Sizes, curves
from support.networks import build, example


@pytest.fixture(scope="module")
def digits() -> lbyl.Prepared:
    x = torch.zeros(1, *zoo.info("digits").input_shape)
    return lbyl.prepare(zoo.create("digits", "shipped"), x, data=256)


@pytest.mark.parametrize("fraction", [0.7, 0.4, 0.25])
def test_macs_and_parameters_keep_to_the_budget(digits: lbyl.Prepared, fraction: float) -> None:
    by_macs = digits.compress(lbyl.Budget(macs=fraction), criterion="l2")
    assert 0.85 * fraction < by_macs.after.macs / by_macs.before.macs <= fraction
    by_size = digits.compress(lbyl.Budget(params=fraction), criterion="l2")
    assert 0.85 * fraction < by_size.after.parameters / by_size.before.parameters <= fraction * 1.01


def test_predicted_sizes_are_the_sizes_of_the_cut_network() -> None:
    for name in ("chain", "bottleneck", "basic"):
        result = lbyl.compress(build(name), example(name), 0.4, method="none")
        counts = {n: len(k) for n, k in result.plan.kept.items()}
        assert Sizes(result.graph).macs(counts) == result.after.macs


def test_error_curves_rise_from_nothing(digits: lbyl.Prepared) -> None:
    for curve in curves(digits.model, digits.graph, digits.statistics()).values():
        assert curve.error[0] == 0 and bool((curve.error.diff() >= 0).all())
        assert curve.error[-1] <= 1


def test_a_larger_error_allowed_removes_more(digits: lbyl.Prepared) -> None:
    sizes = [digits.compress(lbyl.Budget(max_error=e)).after.parameters for e in (0.01, 0.05, 0.2)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_time_is_kept_to_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which time is the number of multiply–accumulates."""
    prepared = lbyl.prepare(build("chain"), example("chain"), data=32)
    sizes = Sizes(prepared.graph)
    full = sizes.macs({unit.name: unit.channels for unit in prepared.graph})
    monkeypatch.setattr(lbyl.Prepared, "_time_fraction", lambda self, left: sizes.macs(left) / full)
    result = prepared.compress(lbyl.Budget(latency=0.5))
    assert 0.3 < result.after.macs / result.before.macs <= 0.5
    monkeypatch.setattr(lbyl.Prepared, "_time_fraction", lambda self, left: 1.0)
    with pytest.raises(lbyl.LbylError, match="no pruned network takes 50%"):
        prepared.compress(lbyl.Budget(latency=0.5))


def test_chosen_ratios_beat_uniform_ones_when_little_is_left(digits: lbyl.Prepared) -> None:
    images = data.load("digits")
    chosen = digits.compress(lbyl.Budget(macs=0.25), criterion="echo")
    uniform = digits.compress(0.7, criterion="echo")
    assert uniform.after.macs <= 0.25 * uniform.before.macs * 1.05
    assert data.evaluate("digits", chosen.model, images) > data.evaluate(
        "digits", uniform.model, images
    )


@pytest.mark.parametrize(
    "given",
    [
        {"macs": 0},
        {"macs": 1.5},
        {"params": -1},
        {"latency": True},
        {"max_error": "small"},
        {"macs": 0.5, "params": 0.5},
        {},
    ],
)
def test_budgets_that_mean_nothing_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(lbyl.LbylError, match=next(iter(given), "exactly one of macs, params")):
        lbyl.Budget(**given)


def test_a_budget_too_small_is_refused(digits: lbyl.Prepared) -> None:
    with pytest.raises(lbyl.LbylError, match="cannot be met"):
        digits.compress(lbyl.Budget(macs=0.001))


def test_errors_of_layers_order_the_methods(digits: lbyl.Prepared) -> None:
    found = digits.layer_errors((0.3, 0.5))
    assert len(found.rows) == len(digits.graph) * 2 * 4 and "WARE" in str(found)
    ware = {(r.unit, r.ratio, r.method): r.ware for r in found.rows}
    for unit in digits.graph.names:
        assert ware[unit, 0.3, "echo"] < ware[unit, 0.3, "none"]
        assert ware[unit, 0.3, "echo"] < ware[unit, 0.5, "echo"]
        # Nothing delivered loses each pruned channel whole.
        gone = next(r for r in found.rows if (r.unit, r.ratio, r.method) == (unit, 0.5, "none"))
        assert gone.ware == pytest.approx(1 - gone.kept / gone.channels)
