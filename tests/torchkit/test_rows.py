"""Products of rows: the same by whichever library computes them."""

from __future__ import annotations

import pytest
import torch

from lbyl.statistics.solve import add_gram, mirror
from lbyl.torchkit import rows
from lbyl.torchkit.rows import convolves, row_products

SIZES = [(256, 64, 64), (1000, 65, 130), (1023, 200, 64), (300, 8, 64), (20, 64, 64), (1, 3, 2)]


@pytest.mark.parametrize("count, one, other", SIZES)
def test_products_are_those_of_the_matrices(count: int, one: int, other: int) -> None:
    left, right = torch.randn(count, one) + 1, torch.randn(count, other)
    wanted = left.double().T @ right.double()
    scale = left.double().norm(dim=0)[:, None] * right.double().norm(dim=0)
    assert float(((row_products(left, right).double() - wanted) / scale).abs().max()) < 1e-6


def test_columns_of_a_wider_matrix_are_rows_too() -> None:
    wide = torch.randn(640, 200)
    one, other = wide[:, 10:90], wide[:, 100:]
    torch.testing.assert_close(row_products(one, other), one.T @ other, rtol=1e-4, atol=1e-3)


def test_other_numbers_than_float32_are_multiplied_as_they_are() -> None:
    left, right = torch.randn(512, 70).double(), torch.randn(512, 90).double()
    assert not convolves(left)
    assert torch.equal(row_products(left, right), left.T @ right)


@pytest.mark.parametrize("instructions", [rows.WIDEST, "none of them"])
@pytest.mark.parametrize("width, block", [(96, 512), (300, 128), (256, 64)])
def test_gram_sums_are_symmetric_and_right(
    width: int, block: int, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "WIDEST", instructions)
    samples = torch.randn(700, width) + 0.5
    sums = torch.eye(width, dtype=torch.float64)
    found = mirror(add_gram(sums, samples, block), block)
    wanted = torch.eye(width, dtype=torch.float64) + samples.double().T @ samples.double()
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)
