"""How much accuracy is kept, told without data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app.sources import resolve
from support.by_hand import divergence, repeated
from support.networks import build, example

pytestmark = pytest.mark.usefixtures("whole_forecast")
INPUTS = 384  # a quarter of those that `repeated` gives


@pytest.fixture(scope="module")
def prepared() -> lbyl.Prepared:
    network = resolve("lbyl:digits", "shipped")
    return lbyl.prepare(network.model, network.example)


class Wrong(nn.Module):
    """Swaps the scores of so many of the inputs that repeat."""

    def __init__(self, model: nn.Module, x: Tensor, wrong: int) -> None:
        super().__init__()
        self.run, self.wrong = [model], x[:wrong]  # a list hides the network's modules

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run[0](x)
        bad = (x[:, None] == self.wrong[None]).flatten(2).all(2).any(1)
        return torch.where(bad.view(-1, *[1] * (out.dim() - 1)), -out, out)


def odds(p: float) -> float:
    p = min(max(p, 0.01), 0.99)
    return math.log(p / (1 - p))


def wilson(p: float, n: int) -> list[float]:
    z = 1.645**2 / n
    half = math.sqrt(z * p * (1 - p) + z**2 / 4)
    return [max(0.0, (p + z / 2 - half) / (1 + z)), min(1.0, (p + z / 2 + half) / (1 + z))]


def test_agreement_and_divergence_are_those_of_the_inputs_and_accuracy_follows() -> None:
    """On the logit scale kept accuracy is a line, and bounds are wider by what chance does."""
    model, x = build("dense").double(), example("dense", 16).double()
    prepared = lbyl.prepare(model, x[:2], data=repeated(x))
    told = []
    for wrong in range(17):
        slim = Wrong(model, x, wrong)
        one = prepared.forecast(slim)
        assert one is not None and (one.source, one.inputs) == ("own", INPUTS)
        assert one.agreement == 1 - wrong / 16
        by_hand = divergence(model, slim, x, warmer=2.0)
        assert one.divergence == pytest.approx(by_hand, rel=1e-6, abs=1e-12)
        assert 0 <= one.low < one.kept < one.high <= 1
        told.append(one)
    slope = (odds(told[4].kept) - odds(told[8].kept)) / (odds(0.75) - odds(0.5))
    gaps = []
    for one in told[2:9]:  # between ends that are cut off
        middle = odds(told[8].kept) + slope * odds(one.agreement)
        assert odds(one.kept) == pytest.approx(middle)
        bounds = [odds(told[8].kept) + slope * odds(p) for p in wilson(one.agreement, INPUTS)]
        below, above = middle - odds(one.low), odds(one.high) - middle
        gaps.append((below**2 - (middle - bounds[0]) ** 2, above**2 - (bounds[1] - middle) ** 2))
    for side in zip(*gaps):
        assert side == pytest.approx([side[0]] * len(side)) and side[0] > 0
    for column in ("kept", "low", "high"):  # more equal answers never lower a figure
        values = [getattr(one, column) for one in told]
        assert values == sorted(values, reverse=True)
    assert told[16].lost and not told[0].lost


def test_answers_are_of_examples_tokens_and_pixels() -> None:
    x = torch.randn(16, 3, 4, 4).double()
    several = nn.Conv2d(3, 2, 1).double()
    one = nn.Conv2d(3, 1, 1).double()

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(1, 2))  # type: ignore[no-any-return]

    for model, known in ((several, True), (Tokens(), True), (one, False)):
        told = lbyl.prepare(model, x[:2], data=repeated(x)).forecast(Wrong(model, x, 4))
        assert told is not None and told.kept is None
        assert told.agreement == (0.75 if known else None)
        assert told.divergence == pytest.approx(float(_relative(model, x)), rel=1e-6)
    assert str(told).startswith("outputs differ from the original's by ")


def _relative(model: nn.Module, x: Tensor) -> Tensor:
    """Four of sixteen inputs have the opposite answer."""
    out = model(x)
    return (2 * out[:4]).square().sum() / out.numel() / out.var(correction=0)


def test_less_is_kept_the_more_is_pruned_and_every_result_tells_it(prepared: lbyl.Prepared) -> None:
    results = [prepared.compress({"*": ratio}, criterion="l2") for ratio in (0.1, 0.5, 0.8)]
    kept = [r.forecast.kept for r in results if r.forecast is not None]
    assert len(kept) == 3 and kept == sorted(kept, reverse=True) and kept[0] > kept[2] + 0.1
    first = str(results[0]).splitlines()[0]
    assert first.startswith("keeps about ") and ", at least " in first and "equal answers" in first
    again = lbyl.Result.from_dict(results[0].to_dict(), results[0].model, results[0].plan)
    assert again.forecast == results[0].forecast


def test_outputs_that_are_not_finite_keep_nothing(prepared: lbyl.Prepared) -> None:
    told = prepared.forecast(nn.Sequential(prepared.model, nn.Threshold(math.inf, math.nan)))
    assert told is not None and (told.kept, told.low, told.high) == (0.0, 0.0, 0.0) and told.lost


@pytest.mark.parametrize(("count", "told_on"), [(40, ("fresh", 256)), (200, ("own", 50))])
def test_own_inputs_that_are_enough_are_what_the_forecast_is_told_on(
    count: int, told_on: tuple[str, int]
) -> None:
    """A quarter of them, on which nothing was fitted; fewer than 32 tell nothing."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    result = lbyl.compress(model, torch.randn(2, 6), 0.5, data=torch.randn(count, 6))
    assert result.forecast is not None
    assert (result.forecast.source, result.forecast.inputs) == told_on


def test_a_network_that_no_input_can_be_drawn_for_is_compressed_without_a_forecast() -> None:
    class Fragile(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 4:
                raise ValueError("at most four at once")
            return super().forward(x)  # type: ignore[no-any-return]

    model = Fragile(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    result = lbyl.compress(model, torch.zeros(2, 6), 0.5, method="none")
    assert result.forecast is None
    assert any("no forecast: at most four at once" in line for line in result.fallbacks)


def test_a_budget_of_accuracy_finds_the_smallest_network_that_keeps_it_at_least(
    prepared: lbyl.Prepared,
) -> None:
    results = [prepared.compress(lbyl.Budget(keep=keep), criterion="echo") for keep in (0.9, 0.6)]
    for result, keep in zip(results, (0.9, 0.6)):
        told = result.forecast
        assert told is not None and told.low is not None and told.low >= keep
    large, small = (result.after.macs for result in results)
    assert small < large < results[0].before.macs
    with pytest.raises(lbyl.LbylError, match=r"keep=0\.999 cannot be promised .* the most is 99"):
        prepared.compress(lbyl.Budget(keep=0.999))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(lbyl.LbylError, match="keep= is a fraction of accuracy"):
        lbyl.compress(model, torch.randn(2, 6), lbyl.Budget(keep=0.9))
