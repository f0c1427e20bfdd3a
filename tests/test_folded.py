"""Networks whose BatchNorms were folded into their weights, as ONNX files have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from benchmarks.folded import folded
from lbyl.app.sources import resolve
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
    own = lbyl.compress(plain, x, 0.3, data=torch.randn(200, *x.shape[1:]))
    normed = lbyl.compress(model, x, 0.3)
    said = ["BatchNorm was folded" in " ".join(r.fallbacks) for r in (result, normed, own)]
    assert said == [True, False, False]
    assert result.forecast is not None and normed.forecast is not None
    assert result.forecast.networks != normed.forecast.networks  # a map of its own
    assert max(map(len, str(result).splitlines())) < 100


class Scaled(nn.Module):
    """A network that takes images whose channels are last where asked for."""

    def __init__(self, inner: nn.Module, last: bool) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.permute(0, 3, 1, 2) if self.last else x)


def trained(strength: float, mean: float) -> nn.Module:
    """Filters with biases as training leaves them, for inputs of this strength and mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 6, 3))
    model.append(nn.Flatten()).append(nn.Linear(6 * 30 * 30, 4))
    first, plain = model[0], nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    images = next(iter(lbyl.prepare(plain, torch.zeros(1, 3, 32, 32)).fresh.collection(64).batches))
    with torch.no_grad():
        made = nn.functional.conv2d(images, first.weight, padding=1)
        deviation = made.transpose(0, 1).flatten(1).std(1)
        at_mean = mean * first.weight.sum((1, 2, 3))
        first.weight /= strength
        first.bias.copy_(deviation * torch.randn(48) - at_mean / strength)
    return model.eval()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("strength", "mean"), [(60.0, 0.0), (60.0, 110.0)])
def test_biases_tell_how_strong_inputs_are(strength: float, mean: float, last: bool) -> None:
    model = Scaled(trained(strength, mean), last).eval()
    x = torch.zeros(1, 32, 32, 3) if last else torch.zeros(1, 3, 32, 32)
    drawn = next(iter(lbyl.prepare(model, x).fresh.collection(64).batches))
    assert drawn.shape == (64, *x.shape[1:])
    assert 0.4 * strength < float(drawn.std()) < 2.5 * strength
    assert abs(float(drawn.mean()) - mean) < strength
    normed = nn.Sequential(model, nn.Unflatten(1, (4, 1)), nn.GroupNorm(2, 4)).eval()
    drawn = next(iter(lbyl.prepare(normed, x).fresh.collection(64).batches))
    assert float(drawn.std()) < 0.2 * strength  # whoever normalises is not asked


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


def test_own_images_of_another_scale_are_told() -> None:
    """A network whose first layer asks for 0 to 255, given normalised images."""
    model, x = trained(60.0, 0.0), torch.zeros(1, 3, 32, 32)
    told = [
        [line for line in result.fallbacks if "have a deviation of" in line]
        for scale in (1.0, 60.0)
        for result in [lbyl.compress(model, x, 0.3, data=scale * torch.randn(40, 3, 32, 32))]
    ]
    assert len(told[0]) == 1 and "are they normalised" in told[0][0]
    assert not told[1]
