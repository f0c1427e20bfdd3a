"""The images that replace data, as the network sees them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app import data
from lbyl.app.sources import zoo
from support.networks import fingerprint
from support.seen import images, watched

SHAPES = [(1, 28, 28), (3, 32, 32), (5, 17, 40), (2, 100), (1, 8, 12, 10), (3, 1, 1), (2, 1, 9)]


def plain(channels: int = 3, dims: int = 2) -> nn.Module:
    """A network that says nothing of its images."""
    conv = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims]
    one = () if dims == 0 else (1,)
    first, last = conv(channels, 4, *one, bias=False), conv(4, 2, *one, bias=False)
    return nn.Sequential(first, nn.ReLU(), last).eval()


def painted(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Images as they are for a network that says nothing of its own."""
    return images(plain(shape[0], len(shape) - 1), torch.zeros(2, *shape), count, seed=seed)


@pytest.mark.parametrize("shape", [*SHAPES, (50,)])
def test_every_shape_is_taken(shape: tuple[int, ...]) -> None:
    made = painted(40, shape)
    assert made.shape == (40, *shape) and made.dtype == torch.float32
    assert made.isfinite().all() and made.abs().max() < 50
    assert not torch.equal(made[0], made[1])
    assert 0.3 < float(made.std()) < 3 and abs(float(made.mean())) < 1


def test_images_follow_from_the_seed_alone_and_flat_vectors_are_flattened_ones() -> None:
    first = painted(9, (1, 28, 28), 3)
    assert torch.equal(first, painted(9, (1, 28, 28), 3))
    assert not torch.equal(first, painted(9, (1, 28, 28), 4))
    model, before = plain(784, 0), torch.get_rng_state()
    assert torch.equal(first.flatten(1), images(model, torch.zeros(2, 784), 9, seed=3))
    assert torch.equal(before, torch.get_rng_state())
    x = torch.zeros(2, 784)
    asked, default = (lbyl.prepare(model, x, data=n).statistics() for n in (1024, None))
    assert all(torch.equal(m.mean, default.moments[n].mean) for n, m in asked.moments.items())


def test_scenes_have_the_statistics_of_normalised_photographs() -> None:
    made = painted(600, (3, 48, 48))
    channels = made.transpose(0, 1).flatten(1)
    assert channels.mean(1).abs().max() < 0.1 and (channels.std(1) - 1).abs().max() < 0.1
    assert made.mean((1, 2, 3)).std().item() == pytest.approx(0.5, rel=0.15)
    corr = torch.corrcoef(channels)[~torch.eye(3, dtype=torch.bool)]
    assert corr.min() > 0.7 and corr.max() < 0.98
    # Edges are rare and strong, and amplitudes fall with the frequency.
    steps = made.diff(dim=3).flatten(1)
    tails = (steps**4).mean(1) / steps.square().mean(1).square()
    assert tails.median() > 10 and tails.quantile(0.1) > 5
    power = torch.fft.fft2(made.mean(1)).abs().square().mean(0)
    side = torch.fft.fftfreq(48)
    frequency = (side[:, None].square() + side.square()).sqrt()
    band = (frequency > 2 / 48) & (frequency < 0.4)
    x, y = frequency[band].log(), power[band].log()
    x = x - x.mean()
    assert float(0.5 * (x * y).sum() / x.square().sum()) == pytest.approx(-1.08, abs=0.12)
    sharp = (steps.norm(dim=1) / made.flatten(1).std(1)).log()
    assert sharp.std() > 0.2  # some softer, some sharper


# ------------------------------------------------------ what a first BatchNorm remembers of them


def stem(filters: int = 48) -> nn.Sequential:
    """A first layer of random filters, half of them smooth, and its BatchNorm."""
    conv = nn.Conv2d(3, filters, 5, padding=2)
    with torch.no_grad():
        conv.weight[::2] += conv.weight[::2].mean((2, 3), keepdim=True) * 4
    return nn.Sequential(conv, nn.BatchNorm2d(filters), nn.ReLU(), nn.Conv2d(filters, 4, 1)).eval()


@torch.no_grad()
def remember(model: nn.Sequential, seen: Tensor) -> None:
    entering = model[0](seen)
    model[1].running_var.copy_(entering.var((0, 2, 3)))
    model[1].running_mean.copy_(entering.mean((0, 2, 3)))


@torch.no_grad()
def disagreement(model: nn.Sequential, seen: Tensor) -> float:
    """Deviation of the logarithms of variances seen over those remembered."""
    found = model[0](seen).var((0, 2, 3))
    return float((found / model[1].running_var).log().std())


def roughness(seen: Tensor) -> float:
    return float((seen[..., 1:] - seen[..., :-1]).var() / seen.var())


def real(
    count: int, side: int = 32, scale: float = 1.0, colour: tuple[float, ...] = (0.0,)
) -> Tensor:
    """Softer images, of another strength and mean colour than those that are painted."""
    made = painted(count, (3, side, side), 5)
    made = 0.3 * made + 0.7 * nn.functional.avg_pool2d(made, 3, 1, 1)
    made = made + 0.5 * made.mean(1, keepdim=True)
    made = (made - made.mean((0, 2, 3), keepdim=True)) / made.std() * scale
    return made + torch.tensor(colour)[:, None, None]


@pytest.mark.parametrize(
    ("scale", "colour"),
    [(1.0, (0.0, 0.0, 0.0)), (0.25, (0.4, 0.45, 0.5)), (60.0, (120.0, 110.0, 90.0))],
)
def test_the_first_layer_tells_spectrum_strength_and_colour(
    scale: float, colour: tuple[float, ...]
) -> None:
    model, taught = stem(), real(300, scale=scale, colour=colour)
    remember(model, taught)
    before = fingerprint(model.train())
    made = images(model, torch.zeros(1, 3, 32, 32), 300)
    assert fingerprint(model) == before and model.training and model[1].training
    fresh = painted(300, (3, 32, 32))
    assert disagreement(model, fresh) > 0.2 and disagreement(model, made) < 0.1
    assert float(made.std()) == pytest.approx(float(taught.std()), rel=0.1)
    assert torch.allclose(made.mean((0, 2, 3)), torch.tensor(colour), atol=0.15 * scale)
    assert abs(roughness(made) - roughness(taught)) < 0.4 * (roughness(fresh) - roughness(taught))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_images_are_told_in_any_precision_though_some_filters_are_off(dtype: torch.dtype) -> None:
    model = stem()
    remember(model, real(200))
    model[1].running_var[:3] = 1e-12
    model = model.to(dtype)
    made = images(model, torch.zeros(1, 3, 32, 32, dtype=dtype), 200)
    assert made.dtype == dtype
    model = model.float()
    remembered = model[1].running_var.clone()
    with torch.no_grad():
        found = (model[0](made.float()).var((0, 2, 3)) / remembered)[3:].log()
    assert float(found.std()) < 0.12


def memory(norm: nn.Module, *before: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), *before, norm, nn.Conv2d(8, 2, 1))


SILENT = {
    "no BatchNorm": plain(),
    "an activation before it": memory(nn.BatchNorm2d(8), nn.ReLU()),
    "it remembers nothing": memory(nn.BatchNorm2d(8, track_running_stats=False)),
    "no images": nn.Sequential(
        nn.Flatten(), nn.Linear(768, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)
    ),
    "off altogether": memory(nn.BatchNorm2d(8)),
}


@pytest.mark.parametrize("why", SILENT)
def test_without_a_first_layer_that_says_otherwise_images_stay_as_painted(why: str) -> None:
    model = SILENT[why].eval()
    if why == "off altogether":
        model[1].running_var.zero_()  # type: ignore[index]
    made = images(model, torch.zeros(1, 3, 16, 16), 16)
    assert torch.equal(made, painted(16, (3, 16, 16)))


def test_images_that_agree_already_stay_as_they_are() -> None:
    model = stem()
    remember(model, painted(300, (3, 16, 16), 5))
    made = images(model, torch.zeros(1, 3, 16, 16), 16)
    assert float((made - painted(16, (3, 16, 16))).std()) < 0.25


def test_the_shipped_network_keeps_more_of_its_accuracy_on_them() -> None:
    """Its images are drawn figures, far from what is painted: here the gains are worth points."""
    model, x = zoo.create("digits", "shipped"), torch.zeros(1, *zoo.info("digits").input_shape)
    own, held = painted(1024, (1, 8, 8)), data.load("digits")
    kept = [
        data.evaluate(
            "digits", lbyl.compress(model, x, {"*": 0.8}, criterion="l2", **how).model, held
        )
        for how in ({}, {"data": own})
    ]
    assert kept[0] > kept[1] + 2


# ------------------------------------------------------------------------------------- inversion


def test_inverted_images_agree_with_batchnorm_and_cost_the_network_nothing() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2)
    ).eval()
    remember(model, (2 * painted(512, (1, 5, 5), 5)).tanh().roll(1, 3) + 0.2 * torch.randn(5, 5))
    x, before, told = torch.zeros(1, 1, 5, 5), fingerprint(model), []
    prepared = lbyl.prepare(model, x, data="inversion", progress=lambda *at: told.append(at))
    with watched(prepared.model) as seen:
        prepared.statistics()
    result = prepared.compress({"*": 0.25}, criterion="l2", refine=2)

    def off(made: Tensor) -> Tensor:
        with torch.no_grad():
            entering = model[0](made).transpose(0, 1).flatten(1)
        norm = model[1]
        return ((entering.mean(1) - norm.running_mean) / norm.running_var.sqrt()).abs() + (
            entering.var(1) / norm.running_var
        ).log().abs()

    assert seen[-1].shape == (1024, 1, 5, 5)
    assert off(seen[-1]).mean() < 0.3 * off(painted(1024, (1, 5, 5))).mean()
    assert fingerprint(model) == before and all(p.grad is None for p in model.parameters())
    assert (result.data, "inversion" in result.story) == ("inversion", True)
    assert {"images", "inversion", "collect"} <= result.seconds.keys()
    assert any(name == "inverting" for name, *_ in told)


def test_only_networks_with_batchnorm_and_one_image_tensor_are_inverted() -> None:
    model, x = zoo.create("digits", "shipped"), torch.zeros(1, *zoo.info("digits").input_shape)
    with pytest.raises(lbyl.LbylError, match="inversion"):
        lbyl.compress(model, x, 0.5, data="inverted")
    with pytest.raises(lbyl.LbylError, match="BatchNorm"):
        lbyl.compress(plain(), torch.zeros(1, 3, 8, 8), 0.5, data="inversion")
