"""Sums over all windows by lags, against the windows themselves."""

from __future__ import annotations

import pytest
import torch

from lbyl.graph.unit import Consumer
from lbyl.statistics import samples
from lbyl.statistics.collect import Accumulator, gather_convolution
from lbyl.statistics.samples import Geometry
from lbyl.statistics.windows import are_cheaper

GEOMETRIES = [
    Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    Geometry((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    Geometry((3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2)),
    Geometry((2, 4), (1, 1), ((0, 1), (1, 2)), (1, 1)),
    Geometry((5, 1), (1, 1), ((2, 2), (0, 0)), (1, 3)),
]
SIDES = [(7, 6), (2, 2), (5, 4)]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_sums_by_lags_are_those_of_the_windows(geometry: Geometry, sides: tuple[int, int]) -> None:
    channels, taps = 3, geometry.kernel[0] * geometry.kernel[1]
    x = torch.randn(6, channels, *sides).double() + torch.randn(channels, 1, 1)
    if any(s + sum(p) <= d * (k - 1) for s, p, d, k in zip(sides, *_along(geometry))):
        pytest.skip("the kernel does not fit into the image")
    consumer = Consumer("conv", "conv.weight", None, 1, 0, None, "conv", torch.arange(channels))
    by_lags = Accumulator(consumer, taps, True, None, 1 << 20)
    by_lags.add_windows(x, geometry)
    by_rows = Accumulator(consumer, taps, True, None, 1 << 20)
    for patches in samples.patches_of(x, geometry, 1 << 20, torch.Generator()):
        by_rows.add_patches(patches)
    assert by_lags.count == by_rows.count
    found, wanted = by_lags.moments(), by_rows.moments()
    torch.testing.assert_close(found.mean, wanted.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.covariance, wanted.covariance, rtol=0, atol=1e-12)


def _along(geometry: Geometry) -> tuple[tuple[object, ...], ...]:
    return geometry.padding, geometry.dilation, geometry.kernel


def test_lags_serve_small_maps_of_many_channels_and_rows_serve_large_ones() -> None:
    plain, strided = GEOMETRIES[0], Geometry((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))
    small, large = torch.zeros(8, 4, 7, 7), torch.zeros(8, 4, 64, 64)
    assert are_cheaper(small, plain, 1 << 20) and not are_cheaper(small, plain, 16)
    assert not are_cheaper(small, strided, 1 << 20)
    assert are_cheaper(large, plain, 1 << 20) and not are_cheaper(large, plain, 4096)


@pytest.mark.parametrize("limit", [1 << 20, 40])
def test_a_convolution_is_gathered_either_way(limit: int) -> None:
    x = torch.randn(30, 5, 6, 6) + 1
    consumer = Consumer("conv", "conv.weight", None, 1, 0, None, "conv", torch.arange(5))
    sums = Accumulator(consumer, 9, True, None, limit)
    gather_convolution(sums, x, GEOMETRIES[0], torch.Generator().manual_seed(0))
    assert sums.count == min(limit, 30 * 36)
    mean = sums.moments().mean
    torch.testing.assert_close(mean[:, 4], x.mean((0, 2, 3)).double(), atol=0.5, rtol=0)
