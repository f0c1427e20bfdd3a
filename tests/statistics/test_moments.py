"""Moments against samples: what a consumer makes of its inputs, tap by tap or taps alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lbyl.statistics.moments import Moments, Statistics
from lbyl.statistics.products import ProductMoments
from lbyl.torchkit.tensors import is_finite

FEATURES, TAPS, OUTPUTS = 4, 3, 5
KEPT = torch.tensor([True, False, True, True])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def samples() -> Tensor:
    """(n, features, taps), everything correlated with everything."""
    rows = 1 + drawn(60, FEATURES * TAPS) @ drawn(FEATURES * TAPS, FEATURES * TAPS, seed=1)
    return rows.unflatten(1, (FEATURES, TAPS))


def by_taps(seen: Tensor) -> Moments:
    rows = seen.flatten(1)
    return Moments(seen.mean(0), torch.cov(rows.T, correction=0), TAPS)


def alike() -> tuple[Moments, Tensor]:
    """Moments with taps served alike, and the covariance (features · taps)² they stand for."""
    inner = torch.cov(drawn(9, FEATURES).T, correction=0)
    spatial = torch.corrcoef(drawn(9, TAPS, seed=3).T)
    return Moments(drawn(FEATURES, 1, seed=4), inner, 1, spatial), torch.kron(inner, spatial)


def test_outputs_have_the_mean_and_variance_of_the_samples() -> None:
    seen, weight = samples(), drawn(OUTPUTS, FEATURES, TAPS, seed=2)
    moments = by_taps(seen)
    made = torch.einsum("nfk,ofk->no", seen, weight)
    close(moments.output_mean(weight), made.mean(0))
    close(moments.output_variance(weight, torch.ones(FEATURES).bool()), made.var(0, correction=0))
    some = weight[:, KEPT]
    made = torch.einsum("nfk,ofk->no", seen[:, KEPT], some)
    close(moments.output_mean(some, KEPT), made.mean(0))
    close(moments.output_variance(some, KEPT), made.var(0, correction=0))


@pytest.mark.parametrize("known", [True, False])
def test_what_changes_is_the_variance_of_the_difference(known: bool) -> None:
    seen, before = samples(), drawn(OUTPUTS, FEATURES, TAPS, seed=2)
    moments, after = by_taps(seen), drawn(OUTPUTS, 3, TAPS, seed=5)
    mixed = before.flatten(1) @ moments.covariance if known else None
    found = moments.output_change(before, after, KEPT, mixed)
    was = torch.einsum("nfk,ofk->no", seen, before)
    now = torch.einsum("nfk,ofk->no", seen[:, KEPT], after)
    for one, made in zip(found, (was, now, was - now)):
        close(one, made.var(0, correction=0))


@pytest.mark.parametrize("measured", [True, False])
def test_taps_served_alike_stand_for_a_product_of_covariances(measured: bool) -> None:
    moments, whole = alike()
    if not measured:  # all taps are then one and the same input
        moments = Moments(moments.mean, moments.covariance)
        whole = torch.kron(moments.covariance, torch.ones(TAPS, TAPS).double())
    before, after = drawn(OUTPUTS, FEATURES, TAPS, seed=6), drawn(OUTPUTS, 3, TAPS, seed=7)
    rows = KEPT.repeat_interleave(TAPS)
    padded = torch.zeros_like(before).index_copy(1, KEPT.nonzero()[:, 0], after)

    def variance(weight: Tensor) -> Tensor:
        flat = weight.flatten(1)
        return ((flat @ whole) * flat).sum(1)

    assert int(rows.sum()) == 9
    close(moments.output_variance(after, KEPT), variance(padded))
    found = moments.output_change(before, after, KEPT)
    for one, weight in zip(found, (before, padded, before - padded)):
        close(one, variance(weight))
    close(moments.output_mean(before), (before.sum(2) @ moments.mean)[:, 0])


def test_channels_have_the_mean_of_their_taps() -> None:
    seen = samples()
    mean, covariance = by_taps(seen).channel_level()
    close(mean, seen.mean((0, 2)))
    each = [torch.cov(seen[..., tap].T, correction=0) for tap in range(TAPS)]
    close(covariance, torch.stack(each).mean(0))
    moments, _ = alike()
    mean, covariance = moments.channel_level()
    assert torch.equal(mean, moments.mean[:, 0]) and covariance is moments.covariance


def test_columns_are_regrouped_by_channel_and_back() -> None:
    columns = torch.tensor([[4, 1, 0], [2, 5, 3]])
    moments = Moments(torch.zeros(2, 1), torch.eye(2), 1, torch.eye(3), columns)
    weight = drawn(OUTPUTS, 6, 2)
    arranged = moments.arrange(weight)
    assert arranged.shape == (OUTPUTS, 2, 6)
    for channel, of in enumerate(columns.tolist()):
        close(arranged[:, channel], weight[:, of].flatten(1))
    every = torch.ones(6).bool()
    assert torch.equal(moments.restore_order(arranged, every, 2), weight)
    kept = torch.tensor([False, False, True, True, False, True])
    assert moments.kept_features(kept).tolist() == [False, True]
    assert torch.equal(moments.restore_order(arranged[:, 1:], kept, 2), weight[:, kept])


def test_without_columns_nothing_is_regrouped() -> None:
    moments, weight = by_taps(samples()), drawn(OUTPUTS, FEATURES, TAPS)
    assert moments.arrange(weight) is weight
    assert moments.restore_order(weight, KEPT, TAPS) is weight
    assert moments.kept_features(KEPT) is KEPT
    assert moments.by_tap(KEPT).tolist() == [k for k in KEPT.tolist() for _ in range(TAPS)]


@pytest.mark.parametrize("part", ["mean", "covariance", "spatial"])
def test_one_number_that_is_none_is_enough(part: str) -> None:
    moments, _ = alike()
    assert is_finite(*moments.numbers)
    getattr(moments, part)[0, 0] = torch.nan
    assert not is_finite(*moments.numbers)


def test_everything_comes_back_from_a_file_and_from_another_device(tmp_path: Path) -> None:
    moments, _ = alike()
    columns = torch.tensor([[0, 2], [1, 3]])
    flat = Moments(drawn(2, 1), torch.eye(2).double(), 1, None, columns)
    products = ProductMoments(drawn(2, 3, 3), drawn(2, 3, 3, seed=1), drawn(2, 3, 3, seed=2))
    whole = Statistics(
        {"a|b": moments, "tap": by_taps(samples()), "flat": flat},
        "inversion",
        {"collect": 1.0},
        ("a: noted",),
        products={"qk": products},
    )
    whole.save(tmp_path / "file")
    for again in (Statistics.load(tmp_path / "file"), whole.to("cpu")):
        assert (again.source, again.fallbacks) == ("inversion", ("a: noted",))
        assert set(again.moments) == set(whole.moments)
        for name, one in whole.moments.items():
            two = again.moments[name]
            assert one.taps == two.taps
            for key in ("mean", "covariance", "spatial", "columns"):
                first, second = getattr(one, key), getattr(two, key)
                assert (first is None and second is None) or torch.equal(first, second)
        for key in ("gram", "query", "key"):
            assert torch.equal(getattr(again.products["qk"], key), getattr(products, key))
