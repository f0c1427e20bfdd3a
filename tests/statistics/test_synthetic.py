"""The procedural images have the statistics that they are made for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lbyl.exceptions import LbylError
from lbyl.images import contact_sheet, preview
from lbyl.statistics import synthetic
from lbyl.statistics.synthetic import KINDS, procedural_images

PLAIN = ("leaves", "pink")
SHAPES = [(1, 28, 28), (3, 32, 32), (5, 17, 40), (3, 64, 24), (2, 100), (1, 8, 12, 10), (50,)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_zero_mean_and_unit_deviation(shape: tuple[int, ...]) -> None:
    images = procedural_images(9, shape, kinds=PLAIN)
    assert images.shape == (9, *shape) and images.dtype == torch.float32
    flat = images.reshape(9, 1 if len(shape) == 1 else shape[0], -1)
    assert flat.mean(2).abs().max() < 1e-4
    assert (flat.std(2, correction=0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("shape", [(3, 20, 30), (2, 64), (1, 6, 7, 8)])
def test_every_kind_takes_every_shape(kind: str, shape: tuple[int, ...]) -> None:
    images = procedural_images(4, shape, kinds=(kind,))
    assert images.shape == (4, *shape) and images.isfinite().all()
    if kind not in synthetic.LIT:
        assert (images.flatten(2).std(2, correction=0) - 1).abs().max() < 1e-3
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
    assert means.std().item() == pytest.approx(synthetic.BRIGHTNESS, rel=0.15)


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


def flat_share(images: Tensor) -> Tensor:
    """Share of horizontal neighbours of the same colour, per image."""
    return (images.diff(dim=3) == 0).all(1).float().mean((1, 2))


def test_leaves_are_flat_inside_and_noise_is_not() -> None:
    images = procedural_images(16, (3, 64, 64), kinds=PLAIN)
    assert flat_share(images[0::2]).min() > 0.5  # every prefix is a mixture: they alternate
    assert flat_share(images[1::2]).max() < 0.01


def test_leaves_are_flat_for_the_most_part_at_full_size() -> None:
    assert flat_share(procedural_images(4, (3, 224, 224), kinds=("leaves",))).min() > 0.8


def test_colour_channels_mostly_agree() -> None:
    for kind in ("leaves", "pink"):
        images = procedural_images(32, (3, 48, 48), kinds=(kind,))
        flat = images.transpose(0, 1).flatten(1)
        corr = torch.corrcoef(flat)[~torch.eye(3, dtype=torch.bool)]
        assert corr.min() > 0.7 and corr.max() < 0.98


@pytest.mark.parametrize("size", [(96, 96), (64, 128)])
def test_slope_of_pink_noise(size: tuple[int, int]) -> None:
    images = procedural_images(64, (1, *size), kinds=("pink",))
    power = torch.fft.fft2(images).abs().square().mean((0, 1))
    rows, columns = (torch.fft.fftfreq(side)[:, None] for side in size)
    frequency = (rows.square() + columns.T.square()).sqrt()
    band = (frequency > 2 / min(size)) & (frequency < 0.4)
    x, y = frequency[band].log(), power[band].log()
    x = x - x.mean()
    amplitude_slope = 0.5 * (x * y).sum() / x.square().sum()
    assert amplitude_slope.item() == pytest.approx(-synthetic.PINK_EXPONENT, abs=0.05)


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
    outlines = synthetic._outlines(3, 60, *size, (1 / 64, 1 / 3), generator)
    labels = synthetic._frontmost(outlines, *size)
    for image in range(3):
        slow = painted_one_by_one(outlines[:, image], *size)
        # A pixel centre that lies on an outline may be rounded to either side.
        assert (labels[image] != slow).float().mean() < 0.002


def test_radii_follow_their_law() -> None:
    # Density ∝ r⁻³ means P(r > x) = (x⁻² − R⁻²)/(r₀⁻² − R⁻²).
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    radii = synthetic._radii(uniform, 192, 256, (1 / 64, 1 / 3))
    assert radii.min() >= 3 - 1e-4 and radii.max() <= 64 + 1e-2
    for x in (4.0, 8.0, 20.0):
        wanted = (x**-2 - 64**-2) / (3**-2 - 64**-2)
        assert (radii > x).float().mean().item() == pytest.approx(wanted, abs=0.004)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = procedural_images(9, (3, 20, 20))
    monkeypatch.setitem(synthetic.CHUNK_PIXELS, "cpu", 1000)
    assert torch.equal(whole, procedural_images(9, (3, 20, 20)))


def test_a_kind_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "KINDS", dict(KINDS))

    @synthetic.register_kind("ramp")
    def ramp(count: int, channels: int, size: tuple[int, ...], _: torch.Generator) -> Tensor:
        return torch.arange(float(size[-1])).expand(count, channels, *size)

    images = procedural_images(3, (1, 4, 8), kinds=("ramp", "noise"))
    assert torch.equal(images[0], images[2]) and (images[0].diff(dim=2) > 0).all()


@pytest.mark.parametrize(
    ("count", "shape", "kinds"),
    [
        (0, (3, 8, 8), ("pink",)),
        (1, (3, 0, 8), ("pink",)),
        (1, (3, 8, 8), ("mud",)),
        (1, (3, 8, 8), ()),
        (1, (1, 2, 3, 4, 5), ("pink",)),
    ],
)
def test_wrong_requests_are_told(
    count: int, shape: tuple[int, ...], kinds: tuple[str, ...]
) -> None:
    with pytest.raises(LbylError):
        procedural_images(count, shape, kinds=kinds)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_leaves_and_pink_noise_on_the_gpu() -> None:
    images = procedural_images(16, (3, 64, 64), device="cuda")
    assert torch.equal(images, procedural_images(16, (3, 64, 64), device="cuda"))
    assert flat_share(images[0::2]).min() > 0.5


# --------------------------------------------------------------------------------- preview


def test_preview_writes_one_picture(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    path = preview(tmp_path / "new" / "sheet.png", count=6, shape=(3, 16, 24))
    assert list(path.parent.iterdir()) == [path]
    with Image.open(path) as picture:
        assert picture.size == (3 * 26 - 2, 2 * 18 - 2)


def test_preview_of_given_images_and_grey() -> None:
    sheet = contact_sheet(torch.randn(3, 1, 5, 7))
    assert sheet.shape == (12, 16, 3) and sheet.dtype == torch.uint8
    assert torch.equal(sheet[..., 0], sheet[..., 2])
    assert (sheet[7:, 9:] == 255).all()  # the fourth cell is empty


def test_preview_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with pytest.raises(LbylError):
        preview(tmp_path / "sheet.png", images=torch.randn(4, 3, 10))
    with pytest.raises(LbylError):
        preview(tmp_path / "sheet.nothing")
    assert list(tmp_path.iterdir()) == []
