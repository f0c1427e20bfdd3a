"""Networks whose BatchNorms were folded into their weights, as ONNX files have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from benchmarks.folded import folded
from lbyl.cli.compress import told_first
from lbyl.inputs.batches import FreshInputs
from lbyl.inputs.procedural import channels_first, procedural_images
from lbyl.inputs.spectrum import match_first_batchnorm, match_first_biases, strength_and_mean
from lbyl.models import Network, resolve
from lbyl.restoring.divergence import as_scores
from lbyl.restoring.forecast import CALIBRATIONS, Forecast, Forecaster
from lbyl.statistics.collect import FORGOTTEN
from support import quick
from support.networks import build, consumer_samples, example


def digits() -> tuple[nn.Module, nn.Module, Tensor]:
    network = resolve("lbyl:digits", "shipped")
    return network.model, folded(network.model, network.example), network.example


def test_folding_leaves_no_batchnorm_and_changes_no_answer() -> None:
    model, plain, x = digits()
    images = torch.randn(5, *x.shape[1:])
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in plain.modules())
    torch.testing.assert_close(plain(images), model(images), rtol=1e-4, atol=1e-4)


def test_networks_in_which_nothing_normalises_have_forgotten() -> None:
    model, plain, x = digits()
    assert lbyl.trace(plain, x).forgot and not lbyl.trace(model, x).forgot
    flat = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    assert not lbyl.trace(flat, torch.zeros(1, 6)).forgot  # nothing was folded into it

    class Written(nn.Module):
        """A norm in arithmetic."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y = (y - y.mean((2, 3), keepdim=True)) * (y.var((2, 3), keepdim=True) + 1e-5).rsqrt()
            return self.b(y)

    assert not lbyl.trace(Written(), torch.zeros(1, 3, 8, 8)).forgot


def test_the_variance_of_a_convolutions_output_goes_into_its_weight() -> None:
    model, x = folded(build("chain", 2), example("chain", 4)).double(), example("chain", 200)
    x = x.double()
    data = quick.own_statistics(model, x[:2], x)
    prepared = lbyl.prepare(model, x[:2], data=data)
    assert prepared.graph.forgot
    plan = quick.plan_for(prepared.graph, {"0": [0, 1, 2, 3, 4, 5]})
    by = {
        correction: prepared.compress(plan, method=quick.correcting("echo", correction)).model
        for correction in ("mean", "mean+variance")
    }
    (_, before), *made = (
        consumer_samples(m, "3", x) for m in (model, by["mean"], by["mean+variance"])
    )
    plain, scaled = (out for _, out in made)
    ratio = plain.var(0) / before.var(0)
    assert bool((ratio < 0.99).any())  # a regression gives less than it was given
    inside = (ratio > 0.06) & (ratio < 3.9)
    torch.testing.assert_close(scaled.var(0)[inside], before.var(0)[inside], rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(scaled.mean(0), before.mean(0), rtol=1e-4, atol=1e-5)


def test_nothing_pruned_changes_nothing() -> None:
    _, plain, x = digits()
    images = torch.randn(3, *x.shape[1:])
    assert torch.equal(quick.compress(plain, x, 0.0).model(images), plain(images))


def test_it_is_said_and_forecast_with_wide_bounds() -> None:
    model, plain, x = digits()
    result = lbyl.compress(plain, x, 0.3)
    assert FORGOTTEN in result.fallbacks
    assert FORGOTTEN not in lbyl.compress(model, x, 0.3).fallbacks
    own = torch.randn(200, *x.shape[1:])
    assert FORGOTTEN not in lbyl.compress(plain, x, 0.3, data=own).fallbacks
    assert lbyl.prepare(plain, x).judges.forecaster.calibration is CALIBRATIONS["folded"]
    assert lbyl.prepare(model, x).judges.forecaster.calibration is CALIBRATIONS["fresh"]
    assert max(map(len, str(result).splitlines())) < 100


def test_own_inputs_count_for_more_beside_images_that_nobody_vouches_for() -> None:
    from lbyl.inputs.loader import own_batches
    from lbyl.statistics.collect import own_weight

    model, plain, x = digits()
    own = own_batches(plain, torch.randn(16, *x.shape[1:]))
    assert own_weight(lbyl.trace(plain, x), own) == 16 / 32
    assert own_weight(lbyl.trace(model, x), own) == 16 / 80


class Scaled(nn.Module):
    """A network that takes images from 0 to 255, its channels last where asked for."""

    def __init__(self, inner: nn.Module, last: bool) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.permute(0, 3, 1, 2) if self.last else x)


def trained(strength: float, mean: float) -> nn.Module:
    """Filters with biases as training leaves them, for inputs of this strength and mean."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 48, 3, padding=1)
    images = procedural_images(64, (3, 32, 32))
    with torch.no_grad():
        made = nn.functional.conv2d(images, first.weight, padding=1)
        deviation = made.transpose(0, 1).flatten(1).std(1)
        at_mean = mean * first.weight.sum((1, 2, 3))
        first.weight /= strength
        first.bias.copy_(deviation * torch.randn(48) - at_mean / strength)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(48, 6, 3), nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("strength", "mean"), [(60.0, 0.0), (60.0, 110.0), (1.0, 0.0)])
def test_biases_tell_how_strong_inputs_are(strength: float, mean: float, last: bool) -> None:
    inner = trained(strength, mean)
    inner(torch.zeros(1, 3, 32, 32))
    model = Scaled(inner, last).eval()
    x = torch.zeros(1, 32, 32, 3) if last else torch.zeros(1, 3, 32, 32)
    assert match_first_batchnorm(model, x) is None
    found = match_first_biases(model, x)
    if strength == 1.0:
        assert found is None  # images as they are painted will do
        return
    assert found is not None and found.mean is not None
    assert 0.5 * strength < float(found.gains[0, 0]) < 2 * strength
    assert float((found.mean - mean).abs().max()) < strength
    normed = nn.Sequential(model, nn.Unflatten(1, (4, 1)), nn.GroupNorm(2, 4))
    assert match_first_biases(normed, x) is None  # whoever normalises is not asked
    drawn = next(iter(FreshInputs(model, x).collection(64).batches))
    assert drawn.shape == (64, *x.shape[1:])
    assert 0.4 * strength < float(drawn.std()) < 2.5 * strength


def test_strength_and_mean_follow_from_biases_though_some_are_far_off() -> None:
    torch.manual_seed(1)
    seen, colour = torch.randn(400, 3).double(), torch.tensor([100.0, 80.0, -30.0]).double()
    bias = 40 * torch.randn(400).double() - seen @ colour
    bias[:20] += 5000
    mean, strength = strength_and_mean(bias, seen)
    assert float((mean - colour).abs().max()) < 15
    assert strength == pytest.approx(40 * 0.6745 / 0.9, rel=0.2)  # of a normal one the median


def test_images_whose_channels_come_last_are_images() -> None:
    assert channels_first((224, 200, 3)) == (3, 224, 200)
    assert channels_first((3, 224, 200)) == (3, 224, 200)
    assert channels_first((64, 7, 7)) == (64, 7, 7)
    last = procedural_images(4, (32, 24, 3), seed=5)
    first = procedural_images(4, (3, 32, 24), seed=5)
    assert torch.equal(last, first.permute(0, 2, 3, 1))


def test_chances_are_compared_as_the_scores_they_were_made_of() -> None:
    scores = torch.randn(20, 5).double() * 3
    chances = scores.softmax(1)
    torch.testing.assert_close(as_scores(chances), scores.log_softmax(1))
    assert as_scores(scores) is not None and torch.equal(as_scores(scores), scores)
    signal = torch.rand(20, 5).double()  # not of one sum
    assert torch.equal(as_scores(signal), signal)
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    assert bool(as_scores(sure).isfinite().all())


def test_one_answer_to_all_inputs_tells_nothing_of_the_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([50.0, 0.0]))
    told = lbyl.compress(model, torch.zeros(1, 6), 0.5).forecast
    assert told is not None and told.one_answer and told.kept is None and told.agreement == 1.0
    assert "what is kept cannot be told" in str(told)
    with pytest.raises(lbyl.LbylError, match="answers alike all inputs"):
        lbyl.compress(model, torch.zeros(1, 6), lbyl.Budget(keep=0.9))
    few = Forecaster(model, [torch.randn(8, 6)])
    assert few(model).kept is not None  # eight alike are chance
    assert Forecast(1.0, 0.0, None, None, None, 8, "fresh").one_answer is False


def test_own_images_of_another_scale_are_told() -> None:
    """A network whose first layer asks for 0 to 255, given normalised images."""
    inner = trained(60.0, 0.0)
    inner(torch.zeros(1, 3, 32, 32))
    model, x = inner.eval(), torch.zeros(1, 3, 32, 32)
    told = [
        [line for line in result.fallbacks if "have a deviation of" in line]
        for scale in (1.0, 60.0)
        for result in [lbyl.compress(model, x, 0.3, data=scale * torch.randn(40, 3, 32, 32))]
    ]
    assert len(told[0]) == 1 and "are they normalised" in told[0][0]
    assert not told[1]


def test_a_network_that_takes_channels_last_reads_images_of_files() -> None:
    inner = trained(1.0, 0.0)
    inner(torch.zeros(1, 3, 32, 32))
    model = Scaled(inner, last=True).eval()
    network = Network("net", model, torch.zeros(1, 32, 32, 3), (32, 32, 3))
    images = torch.randn(2, 3, 32, 32)
    assert network.image_size == 32 and network.channels_last
    assert network.given(images).shape == (2, 32, 32, 3)
    torch.testing.assert_close(network.as_classifier(model)(images), inner(images))


def test_fallbacks_are_shown_the_first_of_many() -> None:
    assert told_first(()) == [] and told_first(("a", "b")) == ["a", "b"]
    assert told_first(("a", "b", "c", "d", "e"))[3:] == ["and 2 more: see fallbacks in plan.json"]
