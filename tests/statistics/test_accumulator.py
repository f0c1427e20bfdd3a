"""Streaming sums at one consumer against the moments of all samples at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lbyl.graph.unit import Consumer
from lbyl.statistics import collect
from lbyl.statistics.collect import Accumulator, padding_masks, sample_limit
from lbyl.statistics.moments import Moments

CONSUMER = Consumer("fc", "fc.weight", None, 1, 0, None, "linear", torch.arange(4))


def accumulator(taps: int = 1, per_tap: bool = True) -> Accumulator:
    return Accumulator(CONSUMER, taps, per_tap, None, 100)


def covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.double().T, correction=0)


def check(moments: Moments, rows: Tensor, rtol: float = 1e-5) -> None:
    expected = covariance(rows)
    torch.testing.assert_close(moments.mean.flatten(), rows.double().mean(0), rtol=rtol, atol=0)
    largest = float(expected.abs().max())
    torch.testing.assert_close(moments.covariance, expected, rtol=rtol, atol=rtol * largest)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_add_up_to_the_whole_at_every_scale(scale: float, dtype: torch.dtype) -> None:
    rows = (scale * (1 + torch.randn(60, 4).double())).to(dtype)
    sums = accumulator()
    sums.add(rows[:10])
    sums.add(rows[10:])
    assert sums.count == 60
    check(sums.moments(), rows)


def test_half_precision_is_summed_with_more_digits() -> None:
    rows = (300 * torch.randn(500, 4)).to(torch.float16)
    sums = accumulator()
    sums.add(rows)
    check(sums.moments(), rows, rtol=1e-4)


def test_taps_are_features_or_are_not() -> None:
    rows = torch.randn(50, 6).double()
    for per_tap, shape in ((True, (3, 2)), (False, (6, 1))):
        sums = accumulator(2, per_tap)
        sums.add(rows)
        moments = sums.moments()
        assert moments.mean.shape == shape and moments.taps == (2 if per_tap else 1)
        assert moments.spatial is None


@pytest.mark.parametrize("taps_in_memory", [True, False])
def test_patches_are_by_channel_and_tap_however_they_lie_in_memory(taps_in_memory: bool) -> None:
    patches = torch.randn(700, 90, 6) + torch.randn(90, 6)  # more features than a block of sums
    rows = patches.flatten(1)
    if taps_in_memory:
        patches = patches.transpose(1, 2).contiguous().transpose(1, 2)
    sums = accumulator(6)
    sums.add_patches(patches[:300])
    sums.add_patches(patches[300:])
    moments = sums.moments()
    assert moments.mean.shape == (90, 6)
    check(moments, rows)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e25])
def test_correlations_between_taps_are_those_about_each_channels_mean(scale: float) -> None:
    patches = scale * (torch.randn(40, 3, 5) @ torch.randn(5, 5) + torch.randn(3, 1))
    sums = accumulator(5, False)
    sums.add(patches.transpose(1, 2).flatten(0, 1))
    sums.add_spatial(patches)
    sums.add_spatial(patches)
    spatial = sums.moments().spatial
    exact = patches.double()
    centred = (exact - exact.mean((0, 2), keepdim=True)).flatten(0, 1)
    product = centred.T @ centred
    root = product.diagonal().sqrt()
    assert spatial is not None
    torch.testing.assert_close(spatial, product / torch.outer(root, root), rtol=1e-4, atol=1e-5)


def test_processes_that_saw_nothing_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process with the same samples: everything doubles, and whoever was idle has it."""
    rows = torch.randn(20, 4).double()
    busy, idle, third = accumulator(4, False), accumulator(4, False), accumulator(4, False)
    busy.add(rows)
    busy.add_spatial(rows.reshape(20, 1, 4))
    alone = (busy.total.clone(), busy.products.clone(), busy.spatial.clone())  # type: ignore[union-attr]
    monkeypatch.setattr(collect, "summed", lambda tensor: 2 * tensor)
    monkeypatch.setattr(collect, "gathered", lambda value: [value, value])
    busy.sum_over_processes(torch.device("cpu"))
    assert busy.count == 40
    for now, before in zip((busy.total, busy.products, busy.spatial), alone):
        assert now is not None and torch.equal(now, 2 * before)
    third.sum_over_processes(torch.device("cpu"))
    assert third.total is None and third.count == 0
    sizes = iter((4, 7))
    monkeypatch.setattr(collect, "largest", lambda number, device: number or next(sizes))
    monkeypatch.setattr(collect, "summed", lambda tensor: tensor + 1)
    monkeypatch.setattr(collect, "gathered", lambda value: [value, 9])
    idle.sum_over_processes(torch.device("cpu"))
    assert idle.count == 9
    assert idle.total is not None and torch.equal(idle.total, torch.ones(4).double())
    assert idle.products is not None and torch.equal(idle.products, torch.ones(4, 4).double())
    assert idle.spatial is not None and torch.equal(idle.spatial, torch.ones(7, 7).double())


def test_samples_are_enough_for_the_features_and_no_more_than_affordable() -> None:
    few, most = collect.FEWEST_SAMPLES, collect.MOST_SAMPLES
    assert sample_limit(1) == most and sample_limit(128) == most
    assert sample_limit(256) == collect.SAMPLED_VALUES // 256
    assert sample_limit(1024) == few
    assert sample_limit(4000) == collect.SAMPLES_PER_FEATURE * 4000


def test_masks_that_hide_some_tokens_are_found() -> None:
    some, every = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.ones(2, 3)
    batch = {"attention_mask": some, "other_mask": every, "none_mask": 0 * every, "ids": some}
    found = padding_masks(batch)
    assert len(found) == 1 and torch.equal(found[0], some.bool())
    assert padding_masks({"mask": torch.tensor([1, 0]), "mask_ratio": 0.5}) == []
    assert padding_masks((some,)) == []
