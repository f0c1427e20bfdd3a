"""Prices of removals, and the allocation that one limit on them gives, by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import lbyl
from lbyl.graph.weights import unit_weights
from lbyl.planning.budget import (
    Curve,
    Sizes,
    bisect_prices,
    curves,
    influence,
    kinds,
    least_kept,
    made_uniform,
    prices,
    savings,
    unit_influence,
    within_error,
)
from lbyl.planning.elimination import EchoCriterion, consumer_view
from lbyl.planning.grouped import group_views
from support.attention import block
from support.networks import build, example


def curve(*errors: float, influence: float = 1.0) -> Curve:
    return Curve(torch.tensor(errors, dtype=torch.float64), influence)


def test_a_price_is_what_noise_to_signal_rises_by_and_never_falls() -> None:
    found = curve(0.0, 0.2, 0.5, 0.6, 1.0, influence=0.5).price
    noise = [0.0, 0.25, 1.0, 1.5, 1000.0]
    rises = [noise[i + 1] - noise[i] for i in range(4)]
    rises[2] = rises[1]  # the third would be cheaper than the second
    assert found.tolist() == pytest.approx([0.5 * rise for rise in rises])


def test_a_curve_adds_up_the_costs_as_fractions_of_what_consumers_make() -> None:
    model = build("chain")
    prepared = lbyl.prepare(model, example("chain"), data=32)
    statistics, weights = prepared.statistics(), unit_weights(prepared.graph, model)
    for name, found in curves(model, prepared.graph, statistics).items():
        view = consumer_view(weights[name], statistics)
        assert view is not None
        order = EchoCriterion().order(weights[name], statistics)
        total = float(torch.trace(view.weight @ view.covariance))
        fractions = torch.tensor([0.0, *(cost / total for _, cost in order)]).cumsum(0)
        assert found.error.tolist() == pytest.approx(fractions.clamp(max=1).tolist(), rel=1e-4)
        assert len(found.error) == weights[name].unit.channels and found.error[0] == 0
        assert float(found.error[-1]) > 0.01


CURVES = {"a": curve(0.0, 0.1, 0.2, 0.4, 0.7), "b": curve(0.0, 0.02, 0.3, 0.5, 0.8, 0.9)}
FULL = {"a": 5, "b": 6}


def size(counts: Mapping[str, int]) -> int:
    return 3 * counts["a"] + counts["b"]


def test_prices_are_by_what_a_channel_saves() -> None:
    found = prices(CURVES, savings(FULL, size))
    assert torch.allclose(found["a"], CURVES["a"].price / 3)
    assert torch.allclose(found["b"], CURVES["b"].price)
    free = prices(CURVES, savings(FULL, lambda counts: 7))
    assert torch.equal(free["a"], CURVES["a"].price)


@pytest.mark.parametrize("budget", range(4, 22))
def test_the_cheapest_removals_that_suffice_are_made(budget: int) -> None:
    """Removals in the order of their price; where the last oversteps, as few as fit."""
    every = prices(CURVES, savings(FULL, size))
    ordered = sorted((float(p), n, i) for n, some in every.items() for i, p in enumerate(some))
    expected = dict(FULL)
    while size(expected) > budget:
        expected[ordered.pop(0)[1]] -= 1
    assert bisect_prices(CURVES, every, size, budget, None) == expected


def test_removals_of_one_price_are_made_as_far_as_needed() -> None:
    even = {"a": curve(*(0.1 * i for i in range(9)))}
    equal = {"a": torch.ones(8).double()}
    for budget in range(1, 10):
        assert bisect_prices(even, equal, lambda c: c["a"], budget, None) == {"a": budget}
        kept = bisect_prices(even, equal, lambda c: c["a"], max(3, budget), 3)["a"]
        assert kept == max(3, budget // 3 * 3)


def test_a_budget_below_all_removals_is_refused() -> None:
    every = prices(CURVES, savings(FULL, size))
    with pytest.raises(lbyl.LbylError, match="smallest network allowed is 4 against 3"):
        bisect_prices(CURVES, every, size, 3, None)


@pytest.mark.parametrize(("limit", "kept"), [(0.05, (5, 5)), (0.2, (3, 5)), (0.3, (3, 4))])
def test_a_limit_on_the_error_stops_before_it_is_passed(
    limit: float, kept: tuple[int, int]
) -> None:
    assert tuple(within_error(CURVES, limit, None).values()) == kept
    rounded = within_error(CURVES, limit, {"a": 2, "b": 4})
    assert rounded == {"a": min(5, kept[0] + kept[0] % 2), "b": {5: 6, 4: 4}[kept[1]]}


@pytest.mark.parametrize(("channels", "kept"), [(1, 1), (19, 1), (20, 2), (640, 64)])
def test_a_tenth_always_stays(channels: int, kept: int) -> None:
    assert least_kept(channels) == kept
    flat = {"a": Curve(torch.zeros(channels).double())}
    assert within_error(flat, 0.5, None) == {"a": kept}


def test_units_of_one_kind_share_their_mean() -> None:
    kind = kinds({"h.0.fc": 8, "h.11.fc": 8, "h.2.fc": 4, "h.0.out": 8})
    assert kind == {"h.0.fc": "h.*.fc 8", "h.11.fc": "h.*.fc 8", "h.2.fc": "h.*.fc 4"} | {
        "h.0.out": "h.*.out 8"
    }
    values = {"h.0.fc": 0.2, "h.11.fc": 0.6, "h.2.fc": 0.5, "h.0.out": 0.1}
    assert made_uniform(values, kind) == pytest.approx(values | {"h.0.fc": 0.4, "h.11.fc": 0.4})


class Residual(nn.Module):
    """A stem and two blocks whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4))
            for _ in range(2)
        )
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for part in self.blocks:
            x = x + part(x)
        out: torch.Tensor = self.head(x)
        return out


def test_influence_is_the_fraction_of_the_sum_so_far() -> None:
    model = Residual().eval()
    with torch.no_grad():
        for norm, gain in zip((model.stem[1], *(b[3] for b in model.blocks)), (1.0, 2.0, -3.0)):
            norm.weight.fill_(gain)
    graph = lbyl.trace(model, torch.zeros(1, 3, 4, 4))
    found = influence(model, graph.all_units)
    assert found["blocks.0.2"] == pytest.approx(4 / 5) == found["blocks.0.0"]
    assert found["blocks.1.2"] == pytest.approx(9 / 14) == found["blocks.1.0"]
    assert found["stem.0"] == 1.0
    by_unit = unit_influence(model, graph)
    assert by_unit == {u.name: found[u.consumers[0]] for u in graph.units}
    assert sorted(by_unit.values()) == pytest.approx([9 / 14, 4 / 5])
    with torch.no_grad():
        model.blocks[1][3].weight.zero_()
    assert influence(model, graph.all_units)["blocks.1.2"] == 1.0


def test_sizes_of_channels_and_heads_multiply() -> None:
    """Queries of two of three heads with two of four channels each: a third of their rows."""
    model, x = block("kernel")
    graph = lbyl.trace(model, x, include=["*:heads", "*:qk", "*:v"])
    sizes = Sizes(graph)
    full = {u.name: u.channels for u in graph.units}
    assert sizes.parameters(full) == sum(p.numel() for p in model.parameters())
    counts = full | {"attention:heads": 2, "attention:qk": 6}
    found = dict(zip(sizes.names, sizes.all(counts).tolist()))
    assert found["attention.q.weight"] == 2 * 2 * 12 and found["attention.q.bias"] == 2 * 2
    assert found["attention.v.weight"] == 2 * 4 * 12
    assert found["attention.out.weight"] == 12 * 2 * 4


def test_layers_without_batchnorm_have_no_power_in_a_sum() -> None:
    model = Residual().eval()
    model.stem[1] = nn.Identity()  # type: ignore[assignment]
    with torch.no_grad():
        model.blocks[0][3].weight.fill_(2.0)
        model.blocks[1][3].weight.fill_(2.0)
    graph = lbyl.trace(model, torch.zeros(1, 3, 4, 4))
    found = influence(model, graph.all_units)
    assert found["stem.0"] == 1.0 and found["blocks.0.2"] == 1.0  # of nothing before it
    assert found["blocks.1.2"] == pytest.approx(1 / 2)


def test_layers_outside_of_sums_have_all_influence() -> None:
    model = build("chain")
    graph = lbyl.trace(model, example("chain"))
    assert unit_influence(model, graph) == {"0": 1.0, "3": 1.0}
    assert set(influence(model, graph.all_units).values()) == {1.0}


@pytest.mark.parametrize("kind", ["heads", "v", "qk"])
def test_curves_of_attention_are_fractions_of_what_its_views_make(kind: str) -> None:
    model, x = block("kernel")
    prepared = lbyl.prepare(model, x, include=f"*:{kind}", data=x)
    (unit,) = prepared.graph.units
    statistics, weights = prepared.statistics(), unit_weights(prepared.graph, model)[unit.name]
    found = curves(model, prepared.graph, statistics)[unit.name].error
    total = sum(view.total for view in group_views(weights, statistics))
    costs = [cost for _, cost in EchoCriterion().order(weights, statistics)]
    expected = torch.tensor([0.0, *costs]).cumsum(0) / total
    assert found.tolist() == pytest.approx(expected.clamp(max=1).tolist(), rel=1e-4, abs=1e-9)
    assert 0 < float(found[1]) < 1
