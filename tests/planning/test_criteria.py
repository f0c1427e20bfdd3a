"""Criteria against their definitions, written out filter by filter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lbyl
from lbyl.graph.weights import UnitWeights, unit_weights
from support import quick
from support.networks import build, example


def layer(name: str, unit: str, seed: int = 0) -> UnitWeights:
    model = build(name, seed)
    return unit_weights(lbyl.trace(model, example(name)), model)[unit]


def select(criterion: object, weights: UnitWeights, count: int) -> list[int]:
    return lbyl.criteria.resolve(criterion).select(weights, count, None).tolist()  # type: ignore[arg-type]


@given(st.integers(0, 1000), st.integers(1, 10))
def test_norms_keep_the_largest(seed: int, count: int) -> None:
    weights = layer("chain", "0", seed)
    filters = weights.filters
    for name, p in (("l1", 1), ("l2", 2)):
        norms = [float(torch.linalg.vector_norm(f, p)) for f in filters]
        best = sorted(range(10), key=lambda i: -norms[i])[:count]
        assert select(name, weights, count) == sorted(best)


@given(st.integers(0, 1000), st.integers(1, 10))
def test_geometric_median_keeps_the_farthest_from_all(seed: int, count: int) -> None:
    weights = layer("chain", "0", seed)
    f = weights.filters
    sums = [sum(float((f[i] - f[k]).norm()) for k in range(10)) for i in range(10)]
    best = sorted(range(10), key=lambda i: -sums[i])[:count]
    assert select("l2-gm", weights, count) == sorted(best)


def test_neurons_are_judged_with_their_bias_and_filters_without() -> None:
    model = build("dense", 1)
    with torch.no_grad():
        model[0].weight[4].zero_()
        model[0].bias[4] = 100.0
    weights = unit_weights(lbyl.trace(model, example("dense")), model)["0"]
    assert select("l2", weights, 1) == [4]
    model = build("biased", 1)
    with torch.no_grad():
        model[0].bias[4] = 100.0
        model[0].weight[4].zero_()
    weights = unit_weights(lbyl.trace(model, example("biased")), model)["0"]
    assert 4 not in select("l2", weights, 9)


def test_of_equal_filters_the_later_goes() -> None:
    model = build("chain", 1)
    with torch.no_grad():
        model[0].weight.copy_(torch.ones_like(model[0].weight))
    weights = unit_weights(lbyl.trace(model, example("chain")), model)["0"]
    for name in ("l1", "l2", "l2-gm"):
        assert select(name, weights, 3) == [0, 1, 2]


def test_random_is_seeded_and_differs_between_units() -> None:
    model, x = build("chain", 1), example("chain")
    weights = unit_weights(lbyl.trace(model, x), model)
    first = [select(lbyl.criteria.Random(seed), weights["0"], 5) for seed in range(10)]
    assert first == [select(lbyl.criteria.Random(seed), weights["0"], 5) for seed in range(10)]
    assert len({tuple(f) for f in first}) > 5
    eights = [
        [i for i in select(lbyl.criteria.Random(s), weights["0"], 8) if i < 8] for s in range(10)
    ]
    assert eights != [select(lbyl.criteria.Random(s), weights["3"], 8) for s in range(10)]


def test_the_published_runs_called_random() -> None:
    weights = layer("chain", "0", 7)
    assert select("random-2", weights, 4) == [6, 7, 8, 9]
    assert select("random-3", weights, 4) == [0, 1, 2, 3]
    digits = []
    for row in weights.filters.float():
        printed = str(row.sum().cpu().numpy())
        digits.append(int([c for c in printed if c.isdigit()][-1]))
    best = sorted(range(10), key=lambda i: digits[i])[:4]
    assert select("random-1", weights, 4) == sorted(best)


@pytest.mark.parametrize("name", lbyl.criteria.names())
def test_every_criterion_keeps_the_number_asked_for_in_order(name: str) -> None:
    model, x = build("bottleneck", 3), example("bottleneck")
    graph = lbyl.trace(model, x)
    weights = unit_weights(graph, model)["conv2"]
    statistics = quick.statistics(model, x)
    for count in range(1, 11):
        kept = lbyl.criteria.resolve(name).select(weights, count, statistics).tolist()
        assert len(kept) == count and kept == sorted(set(kept))
        assert all(0 <= i < 10 for i in kept)


@pytest.mark.parametrize("name", [*lbyl.criteria.names()])
def test_criteria_come_back_from_their_description(name: str) -> None:
    criterion = lbyl.criteria.resolve(name)
    assert lbyl.criteria.resolve(criterion.to_dict()) == criterion
