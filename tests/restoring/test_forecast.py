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
    FRESH,
    OWN,
    Calibration,
    Forecast,
    Forecaster,
    Signs,
    correlation,
    equal_answers,
    wilson,
)
from lbyl.restoring.recalibrate import SecondPass, Seen

pytestmark = pytest.mark.usefixtures("whole_forecast")


@pytest.fixture(scope="module")
def prepared() -> lbyl.Prepared:
    network = resolve("lbyl:digits", "shipped")
    return lbyl.prepare(network.model, network.example)


def test_a_copy_of_the_network_agrees_with_it_and_keeps_all(prepared: lbyl.Prepared) -> None:
    told = prepared.forecast(copy.deepcopy(prepared.model))
    assert told is not None
    assert told.agreement == 1 and told.divergence == pytest.approx(0, abs=1e-12)
    assert told.kept is not None and told.kept > 0.99 and told.high == 1


def test_less_is_kept_the_more_is_pruned_and_every_result_tells_it(prepared: lbyl.Prepared) -> None:
    results = [prepared.compress({"*": ratio}, criterion="l2") for ratio in (0.1, 0.5, 0.8)]
    kept = [r.forecast.kept for r in results if r.forecast is not None]
    assert len(kept) == 3 and kept == sorted(kept, reverse=True) and kept[0] > kept[2] + 0.1
    first = str(results[0]).splitlines()[0]
    assert first.startswith("keeps about ") and "equal answers" in first


def test_answers_of_the_second_pass_serve_the_forecast_until_steps_change_the_network(
    prepared: lbyl.Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    run = SecondPass.run

    def counted(self: SecondPass, model: nn.Module) -> Seen:
        ran.append(model)
        return run(self, model)

    monkeypatch.setattr(SecondPass, "run", counted)
    result = prepared.compress({"*": 0.3}, criterion="l2")
    assert sum(model is result.model for model in ran) == 1
    assert result.forecast == prepared.forecast(result.model)  # asked anew, after BatchNorms moved
    again = prepared.refine(result, 2)
    assert again.forecast == prepared.forecast(again.model)


GRID = [
    Signs(agreement, divergence, correlation)
    for agreement in (0.0, 0.3, 0.9, 1.0)
    for divergence in (0.0, 1e-3, 0.1, 10.0)
    for correlation in (-0.2, 0.5, 0.99, 1.0)
]


def test_the_interval_holds_the_forecast_and_both_stay_between_nothing_and_all() -> None:
    for calibration in (FRESH, OWN):
        for signs in GRID:
            kept, low, high = calibration(signs)
            assert 0 <= low <= kept <= high <= 1


def test_no_sign_for_the_better_lowers_the_forecast() -> None:
    for calibration in (FRESH, OWN):
        for field, better in (("agreement", 0.05), ("divergence", -1e-3), ("correlation", 0.01)):
            for signs in GRID:
                other = dataclasses.replace(signs, **{field: getattr(signs, field) + better})
                assert calibration(other)[0] >= calibration(signs)[0]


def test_errors_between_two_points_of_the_table_lie_on_a_line() -> None:
    points = ((0.0, 0.2, 0.4), (0.5, 0.1, 0.2), (1.0, 0.0, 0.0))
    kept, low, high = Calibration(0.0, {"differing": 1.0}, points)(Signs(0.75, 1.0, 0.5))
    assert kept == pytest.approx(0.75)
    assert (low, high) == (pytest.approx(0.7), pytest.approx(0.85))


def test_outputs_that_are_not_finite_keep_nothing() -> None:
    for apart in (math.inf, math.nan):
        assert FRESH(Signs(0.1, apart, 0.0)) == (0.0, 0.0, 0.0)


def test_scores_that_differ_by_a_factor_or_a_constant_correlate_wholly() -> None:
    scores = torch.randn(20, 5, dtype=torch.float64)
    moved = 3 * scores + torch.randn(20, 1) + torch.randn(5)
    assert correlation(scores, moved) == pytest.approx(1)
    assert correlation(scores, torch.zeros_like(scores)) == 0


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
    signs = Signs(agreement=0.9, divergence=0.1, correlation=0.9)
    kept, low, high = OWN(signs)
    widths = []
    for count in (40, 400, 4_000_000):
        told, least, most = OWN.of_few(signs, count)
        assert 0 <= least < told < most <= 1
        widths.append(most - least)
    assert widths[0] > widths[1] > widths[2]
    assert (told, least, most) == pytest.approx((kept, low, high), abs=1e-3)
    all_equal = OWN.of_few(Signs(1.0, 1e-6, 1.0), 32)
    assert all_equal[1] < 0.96  # 32 of 32 is no certainty


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


def test_a_budget_of_accuracy_finds_the_smallest_network_forecast_to_keep_it(
    prepared: lbyl.Prepared,
) -> None:
    results = [prepared.compress(lbyl.Budget(keep=keep), criterion="echo") for keep in (0.9, 0.6)]
    large, small = results
    for result, keep in zip(results, (0.9, 0.6)):
        assert result.forecast is not None and result.forecast.kept is not None
        assert result.forecast.kept >= keep
    assert small.after.macs < large.after.macs < large.before.macs


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


def test_what_can_only_be_run_is_forecast_by_the_network_it_was_made_from(
    prepared: lbyl.Prepared,
) -> None:
    judge = prepared.judges.forecaster
    assert judge.second_pass is not None
    slim = prepared.compress({"*": 0.3}, method="lbyl").model
    told = [judge(Noisy(slim, noise), made_from=slim) for noise in (0.0, 0.3, 1.0)]
    assert told[0] == judge(slim)
    kept = [forecast.kept for forecast in told]
    assert kept == sorted(kept, reverse=True) and kept[2] < kept[0]
    assert judge(Noisy(prepared.model, 0.0), made_from=prepared.model) == judge(prepared.model)
