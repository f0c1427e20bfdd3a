"""A result tells what was done, not what was asked for."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

import lbyl
from support import quick
from support.measure import relative_error
from support.networks import NETWORKS, build, example


def done(result: lbyl.Result) -> dict[str, int]:
    """How many of each kind of correction were made."""
    return {kind: count for kind, count in asdict(result.corrections).items() if count}


def test_what_was_corrected_is_told_and_not_what_was_asked_for() -> None:
    model, x = build("chain"), example("chain", 40)
    result = lbyl.compress(model, x[:2], 0.5, data="analytic")
    assert result.method["correction"] == "recalibrate"  # asked for
    assert done(result) == {"rewritten": 2, "mean": 2, "variance": 1}
    assert result.data == "analytic" and "recalibrated" not in result.story
    own = lbyl.compress(model, x[:2], 0.5, data=x)
    assert done(own) == {"rewritten": 2, "mean": 2, "variance": 1, "recalibrated": 2}
    assert own.data == "own and procedural"
    procedural = quick.compress(model, x[:2], 0.5)
    assert procedural.corrections.recalibrated == 2
    assert "2 BatchNorms recalibrated" in procedural.story


def test_nothing_pruned_means_nothing_corrected() -> None:
    result = quick.compress(build("chain"), example("chain"), 0.0)
    assert not done(result) and str(result.corrections) == "none"
    assert [row.error for row in result.rows] == [None, None]


def test_a_refinement_that_was_taken_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: no argument makes a refinement fail
    monkeypatch.setattr("lbyl.refining.distil.RATE", 1e8)
    model, x = build("basic"), example("basic")
    plain, wild = (quick.compress(model, x, 0.5, refine=steps) for steps in (0, 3))
    told = wild.refinement
    assert told is not None and (told.asked, told.steps) == (3, 0)
    assert "taken back" in str(told) and "taken back" in wild.story
    assert json.loads(json.dumps(wild.to_dict()))["refinement"]["steps"] == 0
    states = plain.model.state_dict(), wild.model.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_refinement_tells_its_losses() -> None:
    model, x = build("basic"), example("basic")
    result = quick.compress(model, x, 0.5, refine=20)
    told = result.refinement
    assert told is not None and told.steps == 20 and told.loss_after < told.loss_before
    assert "refined by 20 steps" in result.story


def test_a_criterion_without_a_say_is_not_told() -> None:
    model, x = build("chain"), example("chain")
    folded = lbyl.compress(model, x, 0.5, method="fold")
    assert folded.criterion is None and folded.chosen_by == "its own choice"
    assert folded.plan.chosen_by == "fold"
    first = lbyl.compress(model, x, 0.5, method="none", criterion="l1")
    assert first.criterion == {"name": "l1"} and first.chosen_by == "l1"
    again = lbyl.compress(model, x, first.plan, method="lbyl")
    assert again.criterion is None and again.chosen_by == "a given plan (by l1)"
    by_hand = lbyl.Plan({"0": torch.arange(4)}, {"0": 10})
    assert lbyl.compress(model, x, by_hand, method="none").chosen_by == "a given plan"
    other = lbyl.compress(model, x, folded.plan, method="none")
    assert other.chosen_by == "a given plan (by fold)" and "l2" not in str(other)


def test_what_was_looked_at_is_told() -> None:
    model, x = build("chain"), example("chain")
    assert lbyl.compress(model, x, 0.5, method="lbyl").data is None
    assert lbyl.compress(model, x, 0.5, method="moments").data == "analytic"
    assert quick.compress(model, x, 0.5, method="none", criterion="echo").data == "procedural"
    assert quick.compress(model, x, lbyl.Budget(macs=0.5), method="none").data == "procedural"


def test_an_error_is_told_where_it_was_measured() -> None:
    model, x = build("chain"), example("chain")
    weights_alone = lbyl.compress(model, x, 0.5, method="lbyl")
    assert all(row.error is None for row in weights_alone.rows)
    assert "error" not in str(weights_alone)
    measured = quick.compress(model, x, 0.5)
    assert all(row.error is not None and 0 < row.error < 1 for row in measured.rows)
    assert "error" in str(measured)


READ = {"chain": ("0", "3"), "bottleneck": ("conv2", "conv3"), "dense": ("0", "3")}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("method", ["echo", "none", "lbyl"])
def test_the_error_is_that_of_the_consumers_output(name: str, method: str) -> None:
    """On own inputs: the variance of the difference over that of the output, measured directly."""
    unit, consumer = READ[name]
    model, x = build(name, 2).double(), example(name, 200).double()
    prepared = lbyl.prepare(model, x[:2], data=quick.own_statistics(model, x[:2], x))
    channels = prepared.graph[unit].channels
    plan = lbyl.Plan({unit: torch.arange(0, channels, 2)}, {unit: channels})
    correction = "none" if method == "echo" else "mean"  # without statistics nothing is measured
    result = prepared.compress(plan, method=quick.correcting(method, correction))
    (row,) = result.rows
    assert row.error == pytest.approx(relative_error(model, result.model, consumer, x), rel=1e-6)


def test_the_error_follows_from_the_statistics_on_procedural_images_too() -> None:
    model, x = build("chain", 2).double(), example("chain").double()
    prepared = lbyl.prepare(model, x, data=64)
    plan = lbyl.Plan({"0": torch.arange(6)}, {"0": 10})
    result = prepared.compress(plan)
    moments = prepared.statistics().moments["3"]
    new = torch.zeros(8, 10, 9, dtype=torch.float64)
    new[:, :6] = result.model[3].weight.detach().flatten(2)
    old = model[3].weight.detach().flatten(2)
    covariance = moments.covariance

    def variance(weight: torch.Tensor) -> float:
        rows = weight.flatten(1)
        return float(((rows @ covariance) * rows).sum())

    (row,) = result.rows
    assert row.error == pytest.approx(variance(new - old) / variance(old), rel=1e-6)


@pytest.mark.parametrize("name", ["chain", "bottleneck", "biased"])
def test_counted_corrections_are_those_in_the_weights(name: str) -> None:
    model, x = build(name), example(name)
    result = quick.compress(model, x, 0.5, method=quick.correcting("echo", "mean+variance"))
    cut = list(result.graph.consumers.values())
    assert result.corrections.rewritten == len(cut)
    moved = 0
    for consumer in cut:
        key = f"{consumer.name}.bias" if consumer.norm is None else consumer.norm.mean
        state, before = result.model.state_dict(), model.state_dict()
        kept = result.plan.kept.get(consumer.name)
        old = before.get(key, torch.zeros(1))
        moved += not torch.equal(state[key], old if kept is None or len(old) == 1 else old[kept])
    assert result.corrections.mean == moved


@pytest.mark.parametrize("options", [{}, {"method": "fold"}, {"refine": 2}, {"method": "lbyl"}])
def test_to_plain_data_and_back(options: dict[str, object]) -> None:
    model, x = build("bottleneck"), example("bottleneck")
    result = quick.compress(model, x, 0.5, **options)  # type: ignore[arg-type]
    document = json.loads(json.dumps(result.to_dict(plan=False), allow_nan=False))
    again = lbyl.Result.from_dict(document, result.model, result.plan)
    assert again.to_dict() == result.to_dict()
    assert str(again) == str(result) and again.story == result.story


@pytest.mark.parametrize("name", NETWORKS)
def test_results_print_within_a_line(name: str) -> None:
    text = str(quick.compress(build(name), example(name), 0.5, refine=1))
    assert max(map(len, text.splitlines())) < 100
