"""The procedural images have the statistics that they are made for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.inputs import leaves, noise, procedural
from lbyl.inputs.procedural import procedural_images

SHAPES = [(1, 28, 28), (3, 32, 32), (5, 17, 40), (3, 64, 24), (2, 100), (1, 8, 12, 10), (50,)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def painted(count: int, size: tuple[int, int], channels: int = 3) -> Tensor:
    """Dead leaves at the nearest distance, each image with zero mean and unit deviation."""
    ends = procedural.DISTANCES[0]
    made = leaves.dead_leaves(count, channels, size, generator(), ends, procedural.LEAF_COLOUR)
    return procedural._standardised(made)


def pink(count: int, size: tuple[int, ...], channels: int = 3) -> Tensor:
    made = noise.pink_noise(count, channels, size, generator(), procedural.LEAF_COLOUR)
    return procedural._standardised(made)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_taken(shape: tuple[int, ...]) -> None:
    images = procedural_images(9, shape)
    assert images.shape == (9, *shape) and images.dtype == torch.float32
    assert images.isfinite().all() and not torch.equal(images[0], images[1])
    assert 0.3 < float(images.std()) < 3 and abs(float(images.mean())) < 1


@pytest.mark.parametrize("size", [(28, 28), (17, 40), (64, 24)])
def test_images_have_zero_mean_and_unit_deviation_before_the_light(size: tuple[int, int]) -> None:
    for images in (painted(9, size), pink(9, size)):
        flat = images.flatten(1)
        assert flat.mean(1).abs().max() < 1e-4
        assert (flat.std(1, correction=0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("size", [(20, 30), (64,), (6, 7, 8)])
def test_noise_takes_every_number_of_dimensions(size: tuple[int, ...]) -> None:
    images = pink(4, size, 2)
    assert images.shape == (4, 2, *size) and images.isfinite().all()
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 2, 2), (2, 1, 9), (2, 9, 1), (4, 1)])
def test_tiny_shapes_stay_finite(shape: tuple[int, ...]) -> None:
    images = procedural_images(50, shape)
    assert images.isfinite().all() and images.abs().max() < 50
    assert images.std() > 0.3


def test_scenes_are_lit_as_a_normalised_data_set_is() -> None:
    images = procedural_images(1200, (3, 16, 16))
    channels = images.transpose(0, 1).flatten(1)
    assert channels.mean(1).abs().max() < 0.1
    assert (channels.std(1) - 1).abs().max() < 0.1
    means = images.mean((1, 2, 3))
    assert means.std().item() == pytest.approx(procedural.BRIGHTNESS, rel=0.15)


def test_flat_vectors_are_flattened_pictures_where_they_can_be() -> None:
    for length, picture in ((784, (1, 28, 28)), (3072, (3, 32, 32)), (100, (1, 10, 10))):
        flat = procedural_images(4, (length,))
        assert torch.equal(flat, procedural_images(4, picture).flatten(1))


def test_seeds() -> None:
    first = procedural_images(10, (3, 32, 32), seed=3)
    assert torch.equal(first, procedural_images(10, (3, 32, 32), seed=3))
    assert not torch.equal(first, procedural_images(10, (3, 32, 32), seed=4))


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    procedural_images(4, (3, 16, 16))
    assert torch.equal(before, torch.get_rng_state())


def flat_fraction(images: Tensor) -> Tensor:
    """Fraction of horizontal neighbours of the same colour, per image."""
    return (images.diff(dim=3) == 0).all(1).float().mean((1, 2))


def test_leaves_are_flat_inside_and_noise_is_not() -> None:
    assert flat_fraction(painted(8, (64, 64))).min() > 0.5
    assert flat_fraction(pink(8, (64, 64))).max() < 0.01


def test_leaves_are_flat_for_the_most_part_at_full_size() -> None:
    assert flat_fraction(painted(4, (224, 224))).min() > 0.8


def test_colour_channels_mostly_agree() -> None:
    for images in (painted(32, (48, 48)), pink(32, (48, 48))):
        flat = images.transpose(0, 1).flatten(1)
        corr = torch.corrcoef(flat)[~torch.eye(3, dtype=torch.bool)]
        assert corr.min() > 0.7 and corr.max() < 0.98


@pytest.mark.parametrize("size", [(96, 96), (64, 128)])
def test_slope_of_pink_noise(size: tuple[int, int]) -> None:
    images = pink(64, size, 1)
    power = torch.fft.fft2(images).abs().square().mean((0, 1))
    rows, columns = (torch.fft.fftfreq(side)[:, None] for side in size)
    frequency = (rows.square() + columns.T.square()).sqrt()
    band = (frequency > 2 / min(size)) & (frequency < 0.4)
    x, y = frequency[band].log(), power[band].log()
    x = x - x.mean()
    amplitude_slope = 0.5 * (x * y).sum() / x.square().sum()
    assert amplitude_slope.item() == pytest.approx(-noise.PINK_EXPONENT, abs=0.05)


def painted_one_by_one(outline: Tensor, height: int, width: int) -> Tensor:
    """The painter's algorithm, pixel by pixel, straight from the definition of the shapes."""
    labels = torch.zeros(height, width, dtype=torch.int16)
    rows = torch.arange(height)[:, None] + 0.5
    columns = torch.arange(width)[None] + 0.5
    for number, (y, x, _, along, across, sine, cosine) in enumerate(outline.T):
        dy, dx = rows - y, columns - x
        if across == 0:
            inside = dx.square() + dy.square() <= along.square()
        else:
            inside = ((dx * cosine + dy * sine).abs() <= along) & (
                (dy * cosine - dx * sine).abs() <= across
            )
        labels[inside] = number + 1
    return labels


@pytest.mark.parametrize("size", [(40, 56), (33, 20), (7, 1)])
def test_painting_by_spans_is_painting_by_pixels(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    outlines = leaves._outlines(3, 60, *size, (1 / 64, 1 / 3), generator)
    labels = leaves._frontmost(outlines, *size)
    for image in range(3):
        slow = painted_one_by_one(outlines[:, image], *size)
        # A pixel centre that lies on an outline may be rounded to either side.
        assert (labels[image] != slow).float().mean() < 0.002


def test_radii_follow_their_law() -> None:
    # Density ∝ r⁻³ means P(r > x) = (x⁻² − R⁻²)/(r₀⁻² − R⁻²).
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    radii = leaves._radii(uniform, 192, 256, (1 / 64, 1 / 3))
    assert radii.min() >= 3 - 1e-4 and radii.max() <= 64 + 1e-2
    for x in (4.0, 8.0, 20.0):
        wanted = (x**-2 - 64**-2) / (3**-2 - 64**-2)
        assert (radii > x).float().mean().item() == pytest.approx(wanted, abs=0.004)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = procedural_images(9, (3, 20, 20))
    monkeypatch.setitem(leaves.CHUNK_PIXELS, "cpu", 1000)
    monkeypatch.setattr(noise, "PIXELS", 1000)
    assert torch.equal(whole, procedural_images(9, (3, 20, 20)))


@pytest.mark.parametrize(
    ("count", "shape"), [(0, (3, 8, 8)), (1, (3, 0, 8)), (1, (1, 2, 3, 4, 5)), (1, ())]
)
def test_wrong_requests_are_told(count: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(LbylError, match="count" if not count else "shape"):
        procedural_images(count, shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_images_on_the_gpu() -> None:
    images = procedural_images(16, (3, 64, 64), device="cuda")
    assert images.device.type == "cuda" and images.isfinite().all()
    assert torch.equal(images, procedural_images(16, (3, 64, 64), device="cuda"))


def test_images_differ_in_sharpness_and_in_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made = procedural_images(60, (3, 32, 32))
    monkeypatch.setattr(procedural, "SHARPNESS", 0.0)
    even = procedural_images(60, (3, 32, 32))
    assert torch.allclose(made.mean((2, 3)), even.mean((2, 3)), atol=1e-5)
    deviation = [(x - x.mean((2, 3), keepdim=True)).flatten(1).std(1) for x in (made, even)]
    assert torch.allclose(*deviation, rtol=1e-4)
    steps = [(x[..., 1:] - x[..., :-1]).flatten(1).norm(dim=1) for x in (made, even)]
    ratio = (steps[0] / steps[1]).log()
    assert ratio.min() < -0.2 and ratio.max() > 0.2  # some softer, some sharper
    assert abs(float(ratio.mean())) < 0.15
