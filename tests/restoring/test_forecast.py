"""How much accuracy is kept, told without data."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.models import resolve
from lbyl.restoring.forecast import (
    CALIBRATIONS,
    MANY,
    PAYS,
    Calibration,
    Forecast,
    Forecaster,
    equal_answers,
    wilson,
)

pytestmark = pytest.mark.usefixtures("whole_forecast")


@pytest.fixture(scope="module")
def prepared() -> lbyl.Prepared:
    network = resolve("lbyl:digits", "shipped")
    return lbyl.prepare(network.model, network.example)


def test_a_copy_of_the_network_agrees_with_it_and_keeps_all(prepared: lbyl.Prepared) -> None:
    told = prepared.forecast(copy.deepcopy(prepared.model))
    assert told is not None
    assert told.agreement == 1 and told.divergence == pytest.approx(0, abs=1e-12)
    assert told.kept is not None and told.kept > 0.99
    assert told.high is not None and told.high > 0.999


def test_less_is_kept_the_more_is_pruned_and_every_result_tells_it(prepared: lbyl.Prepared) -> None:
    results = [prepared.compress({"*": ratio}, criterion="l2") for ratio in (0.1, 0.5, 0.8)]
    kept = [r.forecast.kept for r in results if r.forecast is not None]
    assert len(kept) == 3 and kept == sorted(kept, reverse=True) and kept[0] > kept[2] + 0.1
    first = str(results[0]).splitlines()[0]
    assert first.startswith("keeps about ") and ", at least " in first and "equal answers" in first


EVERY = pytest.mark.parametrize("calibration", CALIBRATIONS.values(), ids=CALIBRATIONS)
AGREEMENTS = [i / 64 for i in range(65)]


@EVERY
def test_the_interval_holds_the_forecast_and_both_stay_between_nothing_and_all(
    calibration: Calibration,
) -> None:
    for inputs in (8, 256, MANY):
        told = [calibration(agreement, inputs) for agreement in AGREEMENTS]
        assert all(0 <= low < kept < high <= 1 for kept, low, high in told)
        for column in zip(*told):  # more equal answers never lower a figure
            assert list(column) == sorted(column)


def test_bounds_lie_below_and_above_on_the_logit_scale() -> None:
    kept, low, high = Calibration(0.5, 1.0, 1.0, 2.0, 12)(0.75, MANY)
    odds = [math.log(p / (1 - p)) for p in (kept, low, high)]
    assert odds[0] == pytest.approx(0.5 + math.log(3))
    assert (odds[0] - odds[1], odds[2] - odds[0]) == (pytest.approx(1), pytest.approx(2))


@EVERY
@pytest.mark.parametrize("asked", [0.5, 0.9, 0.95, 0.97])
def test_as_many_inputs_are_compared_as_pay(calibration: Calibration, asked: float) -> None:
    count = calibration.inputs_for(asked)
    agreement = min((a for a in AGREEMENTS if calibration(a, MANY)[1] >= asked), default=None)
    if agreement is not None:
        sure = calibration(agreement, MANY)[1]
        assert sure - calibration(agreement, count)[1] <= PAYS + 2e-3
    assert count <= 4096 and calibration.most < 1


def test_outputs_that_are_not_finite_keep_nothing() -> None:
    model, broken = nn.Linear(4, 3), nn.Linear(4, 3)
    with torch.no_grad():
        broken.bias.fill_(math.nan)
    told = Forecaster(model, [torch.randn(64, 4)])(broken)
    assert (told.kept, told.low, told.high) == (0.0, 0.0, 0.0) and told.lost


def test_answers_are_of_examples_tokens_and_pixels() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    other = torch.tensor([[0.3, 0.7], [0.1, 0.9]])
    same = equal_answers([scores], [other])
    assert same is not None and same.tolist() == [True, False]
    tokens = equal_answers([scores[None], torch.zeros(3)], [other[None], torch.zeros(3)])
    assert tokens is not None and tokens.tolist() == [True, False]
    pixels = scores.T[None, :, :, None]  # (1, classes, 2, 1)
    seen = equal_answers([pixels], [other.T[None, :, :, None]])
    assert seen is not None and seen.tolist() == [True, False]
    assert equal_answers([torch.zeros(4)], [torch.zeros(4)]) is None
    assert equal_answers([scores, scores], [other, other]) is None  # two heads, no one answer


def test_a_network_that_gives_one_number_has_a_divergence_and_no_forecast_of_accuracy() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    result = lbyl.compress(model, torch.randn(2, 6), 0.5)
    told = result.forecast
    assert told is not None and told.kept is None and told.agreement is None
    assert told.divergence > 0
    assert str(told).startswith("outputs differ from the original's by ")


@pytest.mark.parametrize(("count", "told_on"), [(40, ("fresh", 256)), (200, ("own", 50))])
def test_own_inputs_that_are_enough_are_what_the_forecast_is_told_on(
    count: int, told_on: tuple[str, int]
) -> None:
    """A quarter of them, on which nothing was fitted; fewer than 32 tell nothing."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    result = lbyl.compress(model, torch.randn(2, 6), 0.5, data=torch.randn(count, 6))
    assert result.forecast is not None
    assert (result.forecast.source, result.forecast.inputs) == told_on


def test_what_chance_adds_to_few_inputs_widens_the_bounds() -> None:
    own = CALIBRATIONS["own"]
    told = [own(0.9, count) for count in (40, 400, 4_000_000)]
    assert len({kept for kept, _, _ in told}) == 1
    widths = [high - low for _, low, high in told]
    assert widths[0] > widths[1] > widths[2]
    assert own(1.0, 32)[1] < 0.96  # 32 of 32 is no certainty


def test_wilsons_bounds_hold_a_probability_in_nine_cases_of_ten() -> None:
    generator = torch.Generator().manual_seed(0)
    for p in (0.5, 0.9):
        drawn = torch.rand(4000, 64, generator=generator) < p
        bounds = [wilson(float(row.double().mean()), 64) for row in drawn]
        inside = sum(low <= p <= high for low, high in bounds) / len(bounds)
        assert 0.85 < inside < 0.96
    assert wilson(1.0, 32)[0] < 0.93 and wilson(1.0, 32)[1] == 1.0


def test_original_outputs_are_computed_once_and_only_as_many_as_can_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import lbyl.restoring.forecast as module

    calls = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    model, slim = Counted(4, 3), nn.Linear(4, 3)
    forecaster = Forecaster(model, list(torch.randn(40, 4).split(10)))
    monkeypatch.setattr(module, "HELD", 60)  # two batches of ten times three
    assert forecaster(slim).inputs == 20
    assert forecaster(slim).inputs == 20 and calls == [10, 10]


def test_a_network_that_no_input_can_be_drawn_for_is_compressed_without_a_forecast() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 4:
                raise ValueError("at most four at once")
            return self.two(self.one(x).relu())

    result = lbyl.compress(Fragile(), torch.zeros(2, 6), 0.5, method="none")
    assert result.forecast is None
    assert any("no forecast: at most four at once" in line for line in result.fallbacks)


def test_a_forecast_survives_being_stored(prepared: lbyl.Prepared) -> None:
    result = prepared.compress(0.5)
    again = lbyl.Result.from_dict(result.to_dict(), result.model, result.plan)
    assert again.forecast == result.forecast != None  # noqa: E711
    assert dataclasses.asdict(Forecast(0.9, 0.1, 0.97, 0.9, 1.0, 64, "fresh"))["kept"] == 0.97


def test_a_budget_of_accuracy_finds_the_smallest_network_that_keeps_it_at_least(
    prepared: lbyl.Prepared,
) -> None:
    results = [prepared.compress(lbyl.Budget(keep=keep), criterion="echo") for keep in (0.9, 0.6)]
    large, small = results
    for result, keep in zip(results, (0.9, 0.6)):
        assert result.forecast is not None and result.forecast.low is not None
        assert result.forecast.low >= keep
    assert small.after.macs < large.after.macs < large.before.macs


def test_where_the_comparison_misses_larger_sizes_are_tried_and_then_none(
    prepared: lbyl.Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    judges, asked = prepared.judges, lbyl.Budget(keep=0.8)
    real, attempts, misses = type(judges).checking, [], 2

    def checking(self: object, kept: float, attempt: int) -> object:
        judge = real(judges, kept, attempt)
        attempts.append(judge.batches[0])
        return lambda slim: dataclasses.replace(
            judge(slim), **({"low": 0.5} if len(attempts) <= misses else {})
        )

    first = prepared.compress(asked, criterion="echo")
    monkeypatch.setattr(type(judges), "checking", checking)
    larger = prepared.compress(asked, criterion="echo")
    assert len(attempts) == 3 and larger.after.macs > first.after.macs
    assert not torch.equal(attempts[0], attempts[1])  # each on inputs of its own
    assert not torch.equal(attempts[1], attempts[2])
    attempts.clear()
    misses = 9
    with pytest.raises(lbyl.LbylError, match=r"last of 4 sizes keeps at least 50\.0%"):
        prepared.compress(asked, criterion="echo")
    assert len(attempts) == 4


def test_more_than_can_be_promised_is_refused_before_the_search(prepared: lbyl.Prepared) -> None:
    with pytest.raises(lbyl.LbylError, match=r"keep=0\.999 cannot be promised .* the most is 99"):
        prepared.compress(lbyl.Budget(keep=0.999))


def test_a_budget_of_accuracy_needs_answers_and_an_accuracy_that_can_be_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(lbyl.LbylError, match="keep= is a fraction of accuracy"):
        lbyl.compress(model, torch.randn(2, 6), lbyl.Budget(keep=0.9))
    with pytest.raises(lbyl.LbylError, match=r"keep is 1\.5"):
        lbyl.Budget(keep=1.5)


class Noisy(nn.Module):
    """Runs like a file of another runtime: nothing of it can be looked into."""

    def __init__(self, model: nn.Module, noise: float) -> None:
        super().__init__()
        self.run, self.noise = [model], noise  # a list hides the network's modules

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run[0](x)
        torch.manual_seed(0)
        return out + self.noise * out.std() * torch.randn_like(out)


def test_what_can_only_be_run_is_forecast_as_networks_are(
    prepared: lbyl.Prepared,
) -> None:
    judge = prepared.judges.forecaster
    slim = prepared.compress({"*": 0.3}, method="lbyl").model
    told = [judge(Noisy(slim, noise)) for noise in (0.0, 0.3, 1.0)]
    assert told[0] == judge(slim)
    kept = [forecast.kept for forecast in told if forecast.kept is not None]
    assert kept == sorted(kept, reverse=True) and kept[2] < kept[0]
    assert judge(Noisy(prepared.model, 0.0)) == judge(prepared.model)
