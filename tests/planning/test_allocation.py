"""Allocations of equal cost, chosen by a score that is given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from lbyl.errors import LbylError
from lbyl.planning.allocation import (
    ALONE,
    HALVINGS,
    LARGER,
    Allocator,
    Score,
    Scores,
    Sensitivity,
    blended,
    fit,
    pruned_fractions,
    spare,
)
from lbyl.planning.budget import Curve

CHANNELS = {"a": 40, "b": 80, "c": 20}
WEIGHT = {"a": 3, "b": 1, "c": 10}  # cost of a channel


def cost(counts: Mapping[str, int]) -> int:
    return sum(WEIGHT[name] * count for name, count in counts.items())


def curve(steepness: float, channels: int) -> Curve:
    fractions = torch.linspace(0, 1, channels, dtype=torch.float64)
    return Curve(0.9 * fractions**2 * steepness)


def each_of(score: Score) -> tuple[Scores, Scores]:
    """Of whole networks and of those with one unit cut, the same."""

    def scores(several: Sequence[Mapping[str, int]]) -> Iterator[float]:
        return map(score, several)

    return scores, scores


def allocator(score: Mapping[str, float], tried: list[dict[str, int]]) -> Allocator:
    """Scores networks by how much of each unit is pruned, weighted: `score` is the truth."""

    def whole(counts: Mapping[str, int]) -> float:
        tried.append(dict(counts))
        fractions = pruned_fractions(counts, CHANNELS)
        return sum(score[n] * fractions[n] ** 2 for n in counts)

    curves = {name: curve(0.5, size) for name, size in CHANNELS.items()}
    return Allocator(curves, CHANNELS, cost, *each_of(whole))


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


def scaled(direction: Mapping[str, float], scale: float) -> dict[str, int]:
    """So many times a direction, by the definition: a tenth of each unit always stays."""
    return {
        name: max(size // 10, math.floor(size * (1 - scale * direction[name]) + 1e-9))
        for name, size in CHANNELS.items()
    }


@pytest.mark.parametrize(
    "direction",
    [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.2, "b": 1.0, "c": 0.5}, {"a": 0.0, "b": 0.1, "c": 1}],
)
@pytest.mark.parametrize("budget", [399, 361, 240, 200, 155])
def test_a_direction_is_gone_to_the_first_place_that_fits(
    direction: dict[str, float], budget: int
) -> None:
    """Counts change right behind where a channel is gone whole: all these places, one by one."""
    places = {
        (gone + 1.01e-9) / (size * direction[name])
        for name, size in CHANNELS.items()
        for gone in range(size)
        if direction[name]
    }
    fitting = (scaled(direction, place) for place in sorted(places))
    expected = next((counts for counts in fitting if cost(counts) <= budget), None)
    found = fit(direction, CHANNELS, cost, budget, None)
    assert found == expected


def test_a_direction_that_leads_nowhere_fits_if_the_whole_does() -> None:
    still = dict.fromkeys(CHANNELS, 0.0)
    assert fit(still, CHANNELS, cost, 400, None) == CHANNELS
    assert fit(still, CHANNELS, cost, 399, None) is None


def test_a_direction_is_gone_to_its_end_where_that_alone_fits() -> None:
    smallest = {"a": 4, "b": 8, "c": 2}
    direction = {"a": 0.01, "b": 1.0, "c": 0.5}
    assert fit(direction, CHANNELS, cost, 40, None) == smallest
    assert fit(direction, CHANNELS, cost, 39, None) is None
    assert fit({"b": 1.0}, CHANNELS, cost, 328, None) == {**CHANNELS, "b": 8}
    assert fit({"b": 1.0}, CHANNELS, cost, 327, None) is None
    assert fit(direction, CHANNELS, cost, 60, {"a": 8}) == {**smallest, "a": 8}


def test_all_candidates_are_tried_and_the_best_is_taken() -> None:
    whole: list[dict[str, int]] = []
    told: list[tuple[str, int, int]] = []
    search = allocator({"a": 1.0, "b": 3.0, "c": 9.0}, whole)
    candidates = search.candidates(0.5)
    assert set(candidates) == {"uniform", "predicted 1", "measured 0.75", "measured 1"}
    whole.clear()
    search.progress = lambda *step: told.append(step)
    best = search.choose(0.5)
    assert whole == list(candidates.values()) and list(best.tried) == list(candidates)
    assert best.tried == {n: next(iter(search.whole([c]))) for n, c in candidates.items()}
    assert best.name == min(best.tried, key=lambda n: best.tried[n])
    assert best.counts == candidates[best.name]
    trials = [step for step in told if step[0] == "trying allocations"]
    assert [step[1:] for step in trials] == [(i, 4) for i in range(1, 5)]


@pytest.mark.parametrize("target", [0.3, 0.55, 0.9])
def test_the_largest_network_within_the_time_is_found(target: float) -> None:
    search = allocator({"a": 1.0, "b": 1.0, "c": 1.0}, [])
    best = search.choose_by_latency(target, lambda counts: cost(counts) / 400)
    assert target - 0.04 < cost(best.counts) / 400 <= target
    exactly = search.choose_by_latency(target, lambda counts: target)
    assert cost(exactly.counts) > 0.95 * 400
    measured = iter([target] * HALVINGS + [0.8 * target])
    with pytest.raises(LbylError, match=f"{target:.1%} of .* says {0.8 * target:.1%}"):
        search.choose_by_latency(target, lambda counts: next(measured))
    with pytest.raises(LbylError, match=f"takes {target:.0%} of the original"):
        search.choose_by_latency(target, lambda counts: 1.0)


@pytest.mark.parametrize("target", [0.3, 0.55, 0.9])
def test_the_smallest_network_that_keeps_enough_is_found(target: float) -> None:
    search = allocator({"a": 1.0, "b": 1.0, "c": 1.0}, [])
    told: list[tuple[str, int, int]] = []
    search.progress = lambda *step: told.append(step)
    sizes = list(search.choose_by_forecast(target, lambda counts: cost(counts) / 400))
    best = sizes[0]
    costs = [cost(size.counts) for size in sizes]
    assert costs == sorted(set(costs)) and 2 <= len(costs) <= 1 + LARGER
    assert target <= cost(best.counts) / 400 < target + 0.04
    assert [s[1:] for s in told if s[0] == "trying sizes"] == [
        (i, HALVINGS) for i in range(1, HALVINGS + 1)
    ]
    exactly = next(search.choose_by_forecast(target, lambda counts: target))
    assert cost(exactly.counts) < 0.15 * 400
    with pytest.raises(LbylError, match="ask for less"):
        next(search.choose_by_forecast(target, lambda counts: 0.0))


def test_everything_may_be_pruned_as_far_as_it_goes() -> None:
    search = allocator({"a": 1.0, "b": 1.0, "c": 1.0}, [])
    best = next(search.choose_by_forecast(0.5, lambda counts: 1.0))
    assert cost(best.counts) / 400 < 0.1 + 2 / 2**HALVINGS + 0.035
    assert set(search.candidates(0.1)) == {"uniform"}
    with pytest.raises(LbylError, match=r"has 10\.0% of the cost, 9\.9% were asked for"):
        search.candidates(0.099)


def test_units_cut_alone_are_cut_as_in_a_uniform_network() -> None:
    tried: list[dict[str, int]] = []
    search = allocator({"a": 1.0, "b": 2.0, "c": 3.0}, tried)
    told: list[tuple[str, int, int]] = []
    search.progress = lambda *step: told.append(step)
    found = search.sensitivities()
    even = fit(dict.fromkeys(CHANNELS, 1.0), CHANNELS, cost, ALONE * 400, None)
    assert even is not None and even == {"a": 24, "b": 48, "c": 12}
    assert tried == [{name: even[name]} for name in CHANNELS]
    assert told == [("cutting units one at a time", step, 3) for step in (0, 3)]
    for name, weight in zip(CHANNELS, (1.0, 2.0, 3.0)):
        error = float(search.curves[name].error[CHANNELS[name] - even[name]])
        assert found[name].divergence == pytest.approx(weight * 0.16)
        assert found[name].noise == pytest.approx(error / (1 - error))
    weighted = search.weighted_curves
    for name, one in found.items():
        assert weighted[name].influence == pytest.approx(one.divergence / one.noise)
        assert weighted[name].error is search.curves[name].error


def test_units_whose_noise_tells_nothing_count_as_the_middle_one() -> None:
    search = allocator({"a": 1.0, "b": 2.0, "c": 3.0}, [])
    for name, divergence, noise in (("a", 8.0, 0.5), ("b", 1.0, 0.0), ("c", 1.0, 0.5)):
        search.measured[name] = Sensitivity(divergence, noise)
    weights = {name: one.influence for name, one in search.weighted_curves.items()}
    assert weights == {"a": 16.0, "b": 16.0, "c": 2.0}  # of two the upper one
    nothing = allocator({"a": 1.0, "b": 2.0, "c": 3.0}, [])
    nothing.measured["a"] = Sensitivity(1.0, 1e-9)
    assert {one.influence for one in nothing.weighted_curves.values()} == {1.0}


def test_errors_that_leave_no_signal_are_a_thousand_times_it() -> None:
    search = allocator({"a": 1.0, "b": 1.0, "c": 1.0}, [])
    search.curves = {name: Curve(torch.ones(size).double()) for name, size in CHANNELS.items()}
    assert {one.noise for one in search.sensitivities().values()} == {1000.0}


def test_where_no_uniform_network_fits_so_much_of_each_unit_is_cut() -> None:
    tried: list[dict[str, int]] = []
    search = allocator({"a": 1.0, "b": 1.0, "c": 1.0}, tried)
    search.cost = lambda counts: 400  # pruning saves nothing
    search.sensitivities()
    assert [min(c.items(), key=lambda i: i[1] / CHANNELS[i[0]]) for c in tried] == [
        ("a", 24),
        ("b", 48),
        ("c", 12),
    ]


def test_units_that_are_not_cut_are_not_tried_alone() -> None:
    tried: list[dict[str, int]] = []
    search = allocator({"a": 1.0, "b": 1.0, "c": 1.0}, tried)
    search.multiple_of = {"c": 20}  # all or nothing of it
    assert set(search.sensitivities()) == {"a", "b"} and len(tried) == 2


def test_blends_go_from_uniform_to_priced() -> None:
    search = allocator({"a": 1.0, "b": 4.0, "c": 30.0}, [])
    found = search.candidates(0.5)
    assert {n for n in found if n.startswith("measured")} == {
        "measured 0.75",
        "measured 1",
    }
    steps = [found[f"measured {w:g}"]["c"] for w in (0.75, 1.0)]
    assert found["uniform"]["c"] < steps[0] < steps[1]
    assert len({tuple(c.values()) for c in found.values()}) == len(found)


def test_units_of_one_kind_are_pruned_alike_where_that_is_asked_for() -> None:
    channels = {"h.0.fc": 40, "h.1.fc": 40, "out": 20}

    def whole(counts: Mapping[str, int]) -> float:
        gone = pruned_fractions({**channels, **counts}, channels)  # others stay whole
        return gone["h.0.fc"] ** 2 + 50 * gone["h.1.fc"] ** 2 + gone["out"] ** 2

    curves = {name: curve(0.5, size) for name, size in channels.items()}

    def search(**options: bool) -> Allocator:
        return Allocator(
            curves,
            channels,
            lambda c: sum(c.values()),
            *each_of(whole),
            **options,  # type: ignore[arg-type]
        )

    apart, alike = search().candidates(0.6), search(uniform=True).candidates(0.6)
    assert apart["measured 1"]["h.1.fc"] > apart["measured 1"]["h.0.fc"]
    assert all(c["h.0.fc"] == c["h.1.fc"] for c in alike.values())


def test_attention_may_be_left_whole() -> None:
    channels = {"fc": 40, "x:heads": 8, "x:queries": 8, "x:v": 40, "x:qk": 40}

    def search(some: Mapping[str, int]) -> Allocator:
        return Allocator(
            {name: curve(0.5, size) for name, size in some.items()},
            some,
            lambda c: sum(c.values()),
            *each_of(lambda counts: 1.0),
        )

    found = search(channels).candidates(0.8)
    assert found["uniform channels"] == {**channels, "fc": 12}  # 108 of 136
    assert found["uniform channels+qk"] == {**channels, "fc": 26, "x:qk": 26}
    # Channels alone cannot save so much.
    assert "uniform channels" not in search(channels).candidates(0.7)
    assert "uniform channels+qk" in search(channels).candidates(0.7)
    # Nothing to leave whole but products of queries and keys, in the first of the two.
    assert "uniform channels+qk" not in search({"fc": 40, "x:qk": 40}).candidates(0.8)
    assert "uniform channels" in search({"fc": 40, "x:qk": 40}).candidates(0.8)
    plain = search({"fc": 40, "other": 30}).candidates(0.8)
    assert not [name for name in plain if name.startswith("uniform ")]


def dear(harm: Mapping[str, float], counts: Mapping[str, int]) -> list[str]:
    """Which units are tried: nothing that is tried helps."""
    found = spare(counts, CHANNELS, harm, cost, lambda trial: 1.0)
    assert found.counts == counts and not found.spared
    return [name.removeprefix("without ") for name in found.tried if name != "uniform"]


def test_units_are_dear_by_their_parts_of_harm_and_saving() -> None:
    counts = {"a": 38, "b": 8, "c": 19}  # saves 6, 72 and 10 of 88
    assert dear({"a": 1.0, "b": 1.0, "c": 1.0}, counts) == ["a"]  # 1/3 · 88/6 = 4.9, then 2.9
    assert dear({"a": 1.0, "b": 1.0, "c": 4.0}, counts) == []  # 2/3 · 88/10 = 5.9, 10 of 88 given
    counts = {"a": 39, "b": 8, "c": 20}  # 3 and 72 of 75; c is whole
    assert dear({"a": 1.0, "b": 1.0, "c": 100.0}, counts) == ["a"]
    assert dear({"a": 4.0, "b": 21.0, "c": 0.0}, counts) == ["a"]  # 4/25 · 75/3: four times
    assert dear({"a": 4.0, "b": 21.1, "c": 0.0}, counts) == []
    assert dear({"b": 0.001}, counts) == []  # of others nothing is known
    assert dear({"b": 1.0}, counts) == [] == dear({}, counts) == dear({"a": 1.0}, CHANNELS)


def test_a_tenth_of_the_saving_may_be_given_up() -> None:
    channels = {"a": 100, "b": 20}

    def tried(saved: int) -> bool:
        counts = {"a": saved, "b": 20 - saved}  # saves a hundred in all
        found = spare(counts, channels, {"b": 1.0}, lambda c: sum(c.values()), lambda c: 1.0)
        return len(found.tried) > 0

    assert tried(10) and not tried(11)


def test_units_are_spared_one_after_the_other() -> None:
    channels, weight = {"a": 100, "b": 20, "c": 20}, {"a": 1, "b": 1, "c": 1}
    counts = {"a": 8, "b": 16, "c": 16}  # saves 92, 4 and 4

    def size(some: Mapping[str, int]) -> int:
        return sum(weight[name] * count for name, count in some.items())

    def whole(trial: Mapping[str, int]) -> float:
        b, c = trial["b"] < 20, trial["c"] < 20
        return 10 - (not b) * 1.7 - (not c) * 1.3

    harm = {"a": 1.0, "b": 3.0, "c": 2.0}
    found = spare(counts, channels, harm, size, whole)
    # b: a sixth less for 4 of 100. c: then 1.3 of 8.3 less, below four times 4 of 96.
    assert found.spared == ("b",) and found.counts == {**counts, "b": 20}
    assert found.tried == pytest.approx({"uniform": 10.0, "without b": 8.3, "without c": 7.0})
    none = spare(counts, channels, harm, size, lambda trial: 0.0)
    assert none.spared == () and none.counts == counts
