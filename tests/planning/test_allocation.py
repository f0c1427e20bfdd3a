"""Allocations of equal cost, chosen by a score that is given."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from lbyl.errors import LbylError
from lbyl.planning.allocation import Allocator, blended, fit, pruned_fractions, spare
from lbyl.planning.budget import Curve

CHANNELS = {"a": 40, "b": 80, "c": 20}
WEIGHT = {"a": 3, "b": 1, "c": 10}  # cost of a channel


def cost(counts: Mapping[str, int]) -> int:
    return sum(WEIGHT[name] * count for name, count in counts.items())


def curve(steepness: float, channels: int) -> Curve:
    fractions = torch.linspace(0, 1, channels, dtype=torch.float64)
    return Curve(0.9 * fractions**2 * steepness)


def allocator(score: Mapping[str, float], tried: list[dict[str, int]]) -> Allocator:
    """Scores networks by how much of each unit is pruned, weighted: `score` is the truth."""

    def whole(counts: Mapping[str, int]) -> float:
        tried.append(dict(counts))
        fractions = pruned_fractions(counts, CHANNELS)
        return sum(score[n] * fractions[n] ** 2 for n in counts)

    curves = {name: curve(0.5, size) for name, size in CHANNELS.items()}
    return Allocator(curves, CHANNELS, cost, whole, lambda several: [whole(c) for c in several])


@pytest.mark.parametrize("multiple_of", [None, 4])
@pytest.mark.parametrize("fraction", [0.9, 0.6, 0.3])
def test_a_direction_is_gone_just_far_enough(fraction: float, multiple_of: int | None) -> None:
    direction = {"a": 0.2, "b": 1.0, "c": 0.5}
    budget = fraction * cost(CHANNELS)
    counts = fit(direction, CHANNELS, cost, budget, multiple_of)
    assert counts is not None and cost(counts) <= budget
    step = (multiple_of or 1) * sum(WEIGHT.values())
    assert cost(counts) > budget - step  # one channel of each unit more would not fit


def test_a_budget_below_the_smallest_network_is_one_clear_error() -> None:
    assert fit(dict.fromkeys(CHANNELS, 1.0), CHANNELS, cost, 1.0, None) is None
    with pytest.raises(LbylError, match="cannot be met by pruning alone"):
        allocator(dict.fromkeys(CHANNELS, 1.0), []).choose(0.001)


def test_blends_lie_between_their_ends() -> None:
    one, other = {"a": 0.0, "b": 0.4}, {"a": 1.0, "b": 0.2}
    assert blended(one, other, 0.0) == one
    assert blended(one, other, 1.0) == other
    assert blended(one, other, 0.5) == pytest.approx({"a": 0.5, "b": 0.3})


def test_the_candidate_that_diverges_least_is_chosen_within_the_budget() -> None:
    tried: list[dict[str, int]] = []
    search = allocator({"a": 1.0, "b": 1.0, "c": 50.0}, tried)
    best = search.choose(0.6)
    assert cost(best.counts) <= 0.6 * cost(CHANNELS)
    assert best.tried[best.name] == min(best.tried.values()) <= best.tried["uniform"]
    assert all(cost(c) <= 0.6 * cost(CHANNELS) for c in search.candidates(0.6).values())


def test_a_unit_that_does_much_to_the_outputs_is_pruned_less() -> None:
    """Equal predictions, but cut alone `c` moves the outputs fifty times as far."""
    search = allocator({"a": 1.0, "b": 1.0, "c": 50.0}, [])
    candidates = search.candidates(0.6)
    assert candidates["measured 1"]["c"] > candidates["predicted 1"]["c"]
    assert search.choose(0.6).name.startswith("measured")


def test_units_are_cut_alone_once_for_all_budgets() -> None:
    tried: list[dict[str, int]] = []
    search = allocator({"a": 1.0, "b": 2.0, "c": 3.0}, tried)
    search.candidates(0.6)
    assert len(tried) == len(CHANNELS)
    search.candidates(0.4)
    assert len(tried) == len(CHANNELS)


def test_a_unit_that_costs_much_and_saves_little_is_spared() -> None:
    counts = {"a": 20, "b": 40, "c": 19}  # `c` saves 10 of 110

    def whole(trial: Mapping[str, int]) -> float:
        return 1.0 + 9.0 * (trial["c"] < CHANNELS["c"])

    harm = {"a": 1.0, "b": 1.0, "c": 30.0}
    allocation = spare(counts, CHANNELS, harm, cost, whole)
    assert allocation.spared == ("c",)
    assert allocation.counts == {**counts, "c": CHANNELS["c"]}
    assert allocation.tried == {"uniform": 10.0, "without c": 1.0}


def test_a_suspect_that_the_whole_network_does_not_confirm_is_pruned() -> None:
    counts, harm = {"a": 20, "b": 40, "c": 19}, {"a": 1.0, "b": 1.0, "c": 30.0}
    allocation = spare(counts, CHANNELS, harm, cost, lambda trial: 1.0)
    assert allocation.spared == () and allocation.counts == counts


def test_units_that_save_much_are_never_spared() -> None:
    counts, harm = {"a": 20, "b": 40, "c": 10}, {"a": 0.0, "b": 0.0, "c": 1.0}

    def fails(trial: Mapping[str, int]) -> float:
        raise AssertionError("nothing is to be tried")

    assert spare(counts, CHANNELS, harm, cost, fails).spared == ()
