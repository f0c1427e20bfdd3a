"""Gains are found again from what a first BatchNorm remembers, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl import data
from lbyl.inputs import noise, spectrum
from lbyl.inputs.batches import FreshInputs
from lbyl.inputs.procedural import procedural_images
from lbyl.inputs.spectrum import (
    SpectrumGains,
    band_filters,
    colour_axes,
    fit_gains,
    match_first_batchnorm,
)
from lbyl.models import zoo
from support.networks import fingerprint


def stem(channels: int = 3, filters: int = 48, kernel: int = 5) -> nn.Sequential:
    """A first layer of random filters, half of them smooth, and its BatchNorm."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, filters, kernel, padding=kernel // 2)
    with torch.no_grad():
        conv.weight[::2] += conv.weight[::2].mean((2, 3), keepdim=True) * 4
    return nn.Sequential(conv, nn.BatchNorm2d(filters), nn.ReLU(), nn.Conv2d(filters, 4, 1)).eval()


@torch.no_grad()
def remember(model: nn.Sequential, images: Tensor) -> None:
    entering = model[0](images)
    model[1].running_var.copy_(entering.var((0, 2, 3)))
    model[1].running_mean.copy_(entering.mean((0, 2, 3)))


@torch.no_grad()
def disagreement(model: nn.Sequential, images: Tensor) -> float:
    """Deviation of the logarithms of variances seen over those remembered."""
    seen = model[0](images).var((0, 2, 3))
    return float((seen / model[1].running_var).log().std())


def gains_of(model: nn.Module, side: int = 32) -> SpectrumGains:
    found = match_first_batchnorm(model, torch.zeros(1, 3, side, side))
    assert found is not None
    return found


def roughness(images: Tensor) -> float:
    return float((images[..., 1:] - images[..., :-1]).var() / images.var())


GAINS = torch.tensor([[0.4, 1.5, 1.0], [0.8, 1.5, 1.2], [1.2, 2.0, 1.0], [1.0, 2.5, 0.6]])


@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_axes_of_colour_begin_with_grey_and_are_orthonormal(channels: int) -> None:
    axes = colour_axes(channels)
    assert torch.allclose(axes @ axes.T, torch.eye(channels, dtype=axes.dtype))
    assert torch.allclose(axes[0], axes[0, 0].expand(channels))


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 9, 14), (4, 7, 5)])
def test_parts_of_an_image_add_up_to_it(shape: tuple[int, ...]) -> None:
    images = procedural_images(3, shape)
    assert torch.allclose(band_filters(shape[1:]).sum(0), torch.ones(1, dtype=torch.float64))
    whole = SpectrumGains(torch.ones(len(spectrum.BLURS) + 1, shape[0]))
    assert torch.allclose(whole(images), images, atol=1e-5)


def test_images_do_not_depend_on_how_many_are_changed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = procedural_images(5, (3, 12, 16))
    whole = SpectrumGains(GAINS)(images)
    monkeypatch.setattr(noise, "PIXELS", 2 * 12 * 16)
    assert torch.allclose(SpectrumGains(GAINS)(images), whole, atol=1e-6)


def test_fine_parts_are_fine_and_grey_parts_are_grey() -> None:
    images = procedural_images(8, (3, 32, 32))
    fine = SpectrumGains(torch.tensor([[1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]))(images)
    broad = SpectrumGains(torch.tensor([[0.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3]))(images)
    grey = SpectrumGains(torch.tensor([[1.0, 0, 0]] * 4))(images)

    assert roughness(fine) > 1 > 0.1 > roughness(broad)
    assert torch.allclose(grey, images.mean(1, keepdim=True).expand_as(grey), atol=1e-5)


def test_gains_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to no prior the proportions of the variances give the gains, but for their size."""
    monkeypatch.setattr(spectrum, "PRIOR", 1e-9)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 5, 30, generator=generator, dtype=torch.float64)
    products = rows @ rows.mT
    gains = torch.tensor([0.3, 0.8, 1.0, 1.7, 2.5], dtype=torch.float64)
    wanted = 7 * torch.einsum("a,fab,b->f", gains, products, gains)
    found = fit_gains(products, wanted)
    assert torch.allclose(found / found[2], gains, rtol=1e-4)


def test_the_first_layer_tells_the_spectrum_of_its_images() -> None:
    model = stem()
    remember(model, SpectrumGains(GAINS)(procedural_images(200, (3, 32, 32), seed=5)))
    found = gains_of(model)
    fresh = procedural_images(200, (3, 32, 32), seed=9)
    assert disagreement(model, fresh) > 0.25
    assert disagreement(model, found(fresh)) < 0.08
    right = roughness(SpectrumGains(GAINS)(fresh))
    assert roughness(fresh) > 1.5 * right
    assert abs(roughness(found(fresh)) - right) < 0.4 * (roughness(fresh) - right)


@pytest.mark.parametrize("scale, colour", [(0.25, (0.4, 0.45, 0.5)), (60.0, (120.0, 110.0, 90.0))])
def test_the_first_layer_tells_how_strong_its_images_are_and_their_mean_colour(
    scale: float, colour: tuple[float, float, float]
) -> None:
    model, mean = stem(), torch.tensor(colour)
    real = SpectrumGains(GAINS)(procedural_images(400, (3, 32, 32), seed=5))
    real = real / real.std() * scale + mean[:, None, None]
    remember(model, real)
    made = gains_of(model)(procedural_images(400, (3, 32, 32), seed=9))
    assert float(made.std()) == pytest.approx(float(real.std()), rel=0.1)
    assert torch.allclose(made.mean((0, 2, 3)), mean, atol=0.15 * scale)


def test_colours_that_no_filter_sees_stay_at_zero() -> None:
    model = stem()
    with torch.no_grad():  # every filter looks for edges alone
        model[0].weight -= model[0].weight.mean((2, 3), keepdim=True)
    remember(model, procedural_images(100, (3, 32, 32), seed=5))
    found = gains_of(model)
    assert found.mean is not None and float(found.mean.abs().max()) < 0.5


def test_images_that_agree_already_stay_as_they_are() -> None:
    model = stem()
    remember(model, procedural_images(300, (3, 32, 32), seed=5))
    found = gains_of(model)
    assert float((found.gains.log()).abs().max()) < 0.15


def test_a_window_of_large_images_is_enough() -> None:
    model = stem()
    remember(model, SpectrumGains(GAINS)(procedural_images(24, (3, 96, 96), seed=5)))
    found = gains_of(model, 96)
    fresh = procedural_images(24, (3, 96, 96), seed=9)
    assert disagreement(model, found(fresh)) < 0.4 * disagreement(model, fresh)


NOBODY_TO_ASK = {
    "no BatchNorm": nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
    "an activation before it": nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)),
    "it remembers nothing": nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)
    ),
    "no images": nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.BatchNorm1d(8)),
}


@pytest.mark.parametrize("why", NOBODY_TO_ASK)
def test_without_a_first_layer_that_remembers_images_stay_as_painted(why: str) -> None:
    model, x = NOBODY_TO_ASK[why].eval(), torch.zeros(1, 3, 16, 16)
    assert match_first_batchnorm(model, x) is None
    batches = list(FreshInputs(model, x).collection(16).batches)
    assert torch.equal(torch.cat(batches), procedural_images(16, (3, 16, 16)))


def test_a_first_layer_that_is_off_altogether_is_not_asked() -> None:
    model = stem()
    with torch.no_grad():
        model[1].running_var.zero_()
    assert match_first_batchnorm(model, torch.zeros(1, 3, 32, 32)) is None


def test_switched_off_filters_have_no_say() -> None:
    model = stem()
    remember(model, SpectrumGains(GAINS)(procedural_images(200, (3, 32, 32), seed=5)))
    with torch.no_grad():
        before = gains_of(model)
        model[1].running_var[:3] = 1e-12
        after = gains_of(model)
    assert torch.allclose(before.gains, after.gains, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_collections_use_it_in_any_precision(dtype: torch.dtype) -> None:
    model = stem()
    remember(model, SpectrumGains(GAINS)(procedural_images(200, (3, 32, 32), seed=5)))
    model, x = model.to(dtype), torch.zeros(1, 3, 32, 32, dtype=dtype)
    batch = next(iter(FreshInputs(model, x).collection(64).batches))
    assert batch.dtype == dtype
    assert disagreement(model.float(), batch.float()) < 0.1


def test_nothing_is_changed_by_asking() -> None:
    model = stem().train()
    before = fingerprint(model)
    match_first_batchnorm(model, torch.zeros(1, 3, 32, 32))
    assert fingerprint(model) == before and model.training and model[1].training


def test_the_shipped_network_keeps_more_of_its_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its images are drawn figures, far from what is painted: here the gains are worth points."""
    model, x = zoo.create("digits", "shipped"), torch.zeros(1, *zoo.info("digits").input_shape)
    held = data.load("digits")

    def kept() -> float:
        return data.evaluate(
            "digits", lbyl.compress(model, x, {"*": 0.8}, criterion="l2").model, held
        )

    matched = kept()
    monkeypatch.setattr("lbyl.inputs.batches.match_first_batchnorm", lambda *_: None)
    assert matched > kept() + 2
