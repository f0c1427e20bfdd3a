"""Positions: windows are those of the convolution, and thinning leaves a fair draw of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lbyl.statistics import samples
from lbyl.statistics.samples import Geometry


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def thin(rows: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    return torch.cat(list(samples.thin(rows, limit, generator)))


def pixels_of(x: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    return torch.cat(list(samples.pixels_of(x, limit, generator)))


def patches_of(x: Tensor, geometry: Geometry, limit: int, generator: torch.Generator) -> Tensor:
    return torch.cat(list(samples.patches_of(x, geometry, limit, generator)))


@pytest.mark.parametrize(("rows", "limit"), [(1000, 100), (1000, 333), (1001, 90), (7, 2)])
def test_so_many_rows_are_left_one_of_each_stretch(rows: int, limit: int) -> None:
    left = thin(torch.arange(rows)[:, None], limit, generator())[:, 0]
    assert len(left) == limit
    stretch = rows / limit
    centres = (torch.arange(limit) + 0.5) * stretch
    assert bool(((left + 0.5 - centres).abs() <= stretch / 2 + 1).all())  # in order


@pytest.mark.parametrize("limit", [1000, 1001, 5000])
def test_few_rows_are_all_kept(limit: int) -> None:
    rows = torch.randn(1000, 3)
    (left,) = samples.thin(rows, limit, generator())
    assert torch.equal(left, rows) and left.data_ptr() == rows.data_ptr()  # and not copied


def test_stretches_shorter_than_two_rows_leave_no_row_twice() -> None:
    left = thin(torch.arange(1000)[:, None], 800, generator())[:, 0]
    assert len(left) == len(left.unique()) == 800


def test_a_limit_of_none_leaves_one_row() -> None:
    assert thin(torch.randn(50, 2), 0, generator()).shape == (1, 2)


def test_no_column_of_an_image_is_preferred() -> None:
    """Every n-th row would see the same columns where n divides the width."""
    columns = torch.arange(32).repeat(32 * 40)[:, None]
    left = thin(columns, len(columns) // 16, generator())[:, 0]
    counts = torch.bincount(left, minlength=32)
    assert int(counts.min()) > 0.5 * float(counts.float().mean())
    assert len(left) == 32 * 40 * 2


def test_thinned_moments_are_near_the_whole() -> None:
    rows = torch.randn(40_000, 4, generator=generator(1)) @ torch.randn(
        4, 4, generator=generator(2)
    )
    some = thin(rows, 8000, generator())
    torch.testing.assert_close(torch.cov(some.T), torch.cov(rows.T), rtol=0.1, atol=0.1)


def test_draws_follow_the_generator_alone() -> None:
    rows = torch.arange(900)[:, None]
    first, again, other = (thin(rows, 90, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


GEOMETRIES = [
    Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    Geometry((3, 2), (2, 1), ((0, 0), (1, 1)), (1, 2)),
    Geometry((5, 5), (1, 2), ((2, 2), (2, 2)), (1, 1)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_windows_are_what_the_kernel_sees(geometry: Geometry) -> None:
    x = torch.randn(3, 4, 11, 9)
    seen = patches_of(x, geometry, 1 << 20, generator())
    pads = tuple(sides[0] for sides in geometry.padding)
    wanted = F.unfold(x, geometry.kernel, geometry.dilation, pads, geometry.stride)
    wanted = wanted.transpose(1, 2).flatten(0, 1).unflatten(1, (4, -1))
    torch.testing.assert_close(seen, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_thinned_windows_are_some_of_them(geometry: Geometry) -> None:
    x = torch.randn(2, 3, 24, 24)
    whole = patches_of(x, geometry, 1 << 20, generator()).flatten(1)
    some = patches_of(x, geometry, len(whole) // 9, generator()).flatten(1)
    assert len(some) == len(whole) // 9
    known = {tuple(row) for row in whole.tolist()}
    assert all(tuple(row) in known for row in some.tolist())


def test_where_there_are_enough_rows_not_every_image_is_looked_at() -> None:
    x = torch.randn(50, 2, 3, 3)
    geometry = Geometry((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    assert patches_of(x, geometry, 20, generator()).shape == (20, 2, 9)


def test_pixels_are_drawn_where_they_lie_in_memory() -> None:
    x = torch.arange(5 * 3 * 8 * 8).reshape(5, 3, 8, 8).float()
    rows = x.movedim(1, -1).flatten(0, -2)
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        assert torch.equal(pixels_of(images, 1000, generator()), rows)
        some = pixels_of(images, 40, generator())
        assert torch.equal(some, thin(rows, 40, generator()))


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 8), (2, 3, 4, 5, 6)])
def test_pixels_of_any_dimensions_are_rows_of_channels(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape)
    rows = x.movedim(1, -1).reshape(-1, 3)
    assert torch.equal(pixels_of(x, 1000, generator()), rows)
    some = pixels_of(x, 4, generator())
    assert some.shape == (4, 3) and torch.equal(some, thin(rows, 4, generator()))


def test_windows_in_one_and_three_dimensions() -> None:
    signal = torch.randn(2, 3, 9)
    geometry = Geometry((4,), (2,), ((1, 1),), (1,))
    seen = patches_of(signal, geometry, 1 << 20, generator())
    padded = F.pad(signal, (1, 1))
    wanted = torch.cat([padded[n, :, i : i + 4][None] for n in range(2) for i in (0, 2, 4, 6)])
    assert torch.equal(seen, wanted)
    volume, weight = torch.randn(1, 2, 4, 5, 6).double(), torch.randn(3, 2, 2, 2, 3).double()
    geometry = Geometry((2, 2, 3), (1, 1, 1), ((0, 0), (1, 1), (0, 0)), (1, 2, 1))
    seen = patches_of(volume, geometry, 1 << 20, generator())
    made = F.conv3d(volume, weight, padding=(0, 1, 0), dilation=(1, 2, 1))
    torch.testing.assert_close(
        seen.flatten(1) @ weight.flatten(1).T, made.movedim(1, -1).flatten(0, -2)
    )


@pytest.mark.parametrize("limit", [1 << 20, 100])
def test_rows_come_in_parts_that_are_no_larger_than_asked_for_and_the_same_in_all(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, geometry = torch.randn(6, 3, 8, 8), GEOMETRIES[0]
    ways = [
        lambda: samples.thin(x.flatten(1), min(limit, 4), generator()),
        lambda: samples.pixels_of(x, limit, generator()),
        lambda: samples.patches_of(x, geometry, limit, generator()),
    ]
    whole = [torch.cat(list(way())) for way in ways]
    monkeypatch.setattr(samples, "rows_at_once", lambda width, device: 3)
    for way, wanted in zip(ways, whole):
        parts = list(way())
        assert len(parts) > 1 and max(map(len, parts)) == 3
        assert torch.equal(torch.cat(parts), wanted)


def test_rows_that_are_copied_at_a_time_take_half_of_the_memory_of_their_covariance() -> None:
    for width in (2048, 4608):
        rows = samples.rows_at_once(width, torch.device("cpu"))
        assert rows * width * 4 <= width * width * 8 / 2
