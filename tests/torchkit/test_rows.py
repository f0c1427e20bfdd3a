"""Products of rows: the same by whichever library computes them."""

from __future__ import annotations

import platform

import pytest
import torch

from lbyl.statistics.solve import add_gram, mirror
from lbyl.torchkit import rows
from lbyl.torchkit.rows import convolves, row_products

SIZES = [(256, 64, 64), (1000, 65, 130), (1023, 200, 64), (300, 8, 64), (64, 3, 2), (20, 64, 64)]


@pytest.fixture(params=[True, False], ids=["convolved", "multiplied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways, whatever this processor is, and for small products too."""
    chosen: bool = request.param
    monkeypatch.setattr(rows, "_convolutions_are_quicker", lambda: chosen)
    monkeypatch.setattr(rows, "FEWEST_PRODUCTS", 1)
    return chosen


@pytest.mark.parametrize("count, one, other", SIZES)
def test_products_are_those_of_the_matrices(way: bool, count: int, one: int, other: int) -> None:
    left, right = torch.randn(count, one) + 1, torch.randn(count, other)
    assert convolves(left, right) == (way and count >= rows.GROUP)
    wanted = left.double().T @ right.double()
    scale = left.double().norm(dim=0)[:, None] * right.double().norm(dim=0)
    assert float(((row_products(left, right).double() - wanted) / scale).abs().max()) < 1e-6


def test_columns_of_a_wider_matrix_are_rows_too(way: bool) -> None:
    wide = torch.randn(650, 200)
    one, other = wide[:, 10:90], wide[:, 100:]
    torch.testing.assert_close(row_products(one, other), one.T @ other, rtol=1e-4, atol=1e-3)


def test_other_numbers_than_float32_are_multiplied_as_they_are(way: bool) -> None:
    left, right = torch.randn(512, 70).double(), torch.randn(512, 90).double()
    assert not convolves(left, right)
    assert torch.equal(row_products(left, right), left.T @ right)


@pytest.mark.parametrize("width, block", [(96, 512), (300, 128), (256, 64)])
def test_gram_sums_are_symmetric_and_right(way: bool, width: int, block: int) -> None:
    samples = torch.randn(700, width) + 0.5
    sums = torch.eye(width, dtype=torch.float64)
    found = mirror(add_gram(sums, samples, block), block)
    wanted = torch.eye(width, dtype=torch.float64) + samples.double().T @ samples.double()
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "maker, capability, quicker",
    [
        ("AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", "AVX512", True),
        ("AMD64 Family 23 Model 49 Stepping 0, AuthenticAMD", "AVX2", False),
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", "AVX512", False),
        ("arm", "DEFAULT", False),
    ],
)
def test_the_processor_decides(
    maker: str, capability: str, quicker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nowhere:
        def __init__(self, path: str) -> None:
            pass

        def open(self, encoding: str) -> None:
            raise FileNotFoundError

    monkeypatch.setattr(rows, "Path", Nowhere)
    monkeypatch.setattr(platform, "processor", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    rows._convolutions_are_quicker.cache_clear()
    try:
        assert rows._convolutions_are_quicker() == quicker
    finally:
        rows._convolutions_are_quicker.cache_clear()
