"""Ridge solutions and Gram products against their closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lbyl.statistics import solve
from lbyl.statistics.solve import (
    add_symmetric,
    cholesky,
    deliver_weight,
    gram,
    mirror,
    regress,
    regroup,
    ridge_inverse,
    solve_ridge,
)
from lbyl.torchkit.fallbacks import noting


def definite(size: int, seed: int = 0) -> Tensor:
    rows = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed)).double()
    return rows.T @ rows


def shifted(matrix: Tensor, ridge: float) -> Tensor:
    return matrix + ridge * matrix.diagonal().mean() * torch.eye(len(matrix)).double()


def close(found: Tensor | None, expected: Tensor, rtol: float = 1e-8) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("ridge", [1e-4, 0.5])
def test_inverses_have_a_ridge_relative_to_the_mean(scale: float, ridge: float) -> None:
    matrix = definite(5)
    expected = torch.linalg.inv(shifted(matrix, ridge))
    close(ridge_inverse(matrix * scale, ridge), expected / scale)


def test_without_a_ridge_there_is_a_billionth() -> None:
    flat = torch.diag(torch.tensor([2.0, 0.0]).double())
    close(ridge_inverse(flat, 0.0), torch.diag(torch.tensor([0.5, 1e9]).double()))
    right = torch.tensor([[3.0, 1.0]]).double()
    close(solve_ridge(right, flat, 0.0), torch.tensor([[1.5, 1e9]]).double())


def test_half_of_what_is_not_symmetric_goes_to_either_side() -> None:
    matrix, off = definite(4), torch.randn(4, 4).double()
    close(ridge_inverse(matrix + off - off.T, 0.1), torch.linalg.inv(shifted(matrix, 0.1)))


def test_of_an_indefinite_matrix_the_positive_part_is_inverted() -> None:
    vectors = torch.linalg.qr(definite(3))[0]
    matrix = vectors @ torch.diag(torch.tensor([4.0, 2.0, -3.0]).double()) @ vectors.T
    values = torch.tensor([4.0, 2.0, 0.0]).double() + 0.1 * 2
    expected = vectors @ torch.diag(1 / values) @ vectors.T
    close(ridge_inverse(matrix, 0.1), expected)
    right = torch.randn(2, 3).double()
    with noting() as notes:
        close(solve_ridge(right, matrix, 0.1), right @ expected)
    assert len(list(notes)) == 1


def test_what_cannot_be_inverted_delivers_nothing() -> None:
    assert ridge_inverse(torch.full((2, 2), torch.inf).double(), 0.1) is None
    close(ridge_inverse(torch.zeros(2, 2).double(), 0.1), torch.zeros(2, 2).double())
    right = torch.ones(3, 2).double()
    with noting() as notes:
        assert not bool(solve_ridge(right, torch.full((2, 2), torch.nan).double(), 0.1).any())
    assert len(list(notes)) == 1


@pytest.mark.parametrize("ridge", [1e-3, 0.3])
def test_solutions_are_those_of_the_shifted_matrix(ridge: float) -> None:
    matrix, right = definite(6), torch.randn(3, 6).double()
    before = matrix.clone()
    expected = right @ torch.linalg.inv(shifted(matrix, ridge))
    close(solve_ridge(right, matrix, ridge), expected)
    close(regress(right, matrix, ridge), expected)
    assert torch.equal(matrix, before)


KEPT, PRUNED = torch.tensor([0, 2, 3, 6]), torch.tensor([1, 4, 5])


@pytest.mark.parametrize("ridge", [1e-3, 0.3])
@pytest.mark.parametrize("known", [True, False])
def test_delivered_weights_are_those_of_the_regression(known: bool, ridge: float) -> None:
    covariance, flat = definite(7), torch.randn(5, 7).double()
    cross = flat[:, PRUNED] @ covariance[PRUNED][:, KEPT]
    inner = covariance[KEPT][:, KEPT]
    expected = flat[:, KEPT] + cross @ torch.linalg.inv(shifted(inner, ridge))
    mixed = flat @ covariance if known else None
    found = deliver_weight(flat, covariance, KEPT, PRUNED, ridge, mixed)
    close(found.weight, expected)
    assert (found.mixed is not None) == known
    if found.mixed is not None:
        close(found.mixed, expected @ inner)


def test_where_nothing_is_pruned_nothing_changes() -> None:
    covariance, flat = definite(4), torch.randn(2, 4).double()
    every, none = torch.arange(4), torch.arange(0)
    found = deliver_weight(flat, covariance, every, none, 0.1, flat)
    assert torch.equal(found.weight, flat) and found.mixed is flat


def test_a_poor_factor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights stay, but what they make of the covariance is not said to be known."""
    covariance, flat = definite(7), torch.randn(5, 7).double()
    by_factor = solve.by_factor

    def poor(factor: Tensor, right: Tensor) -> Tensor:
        return by_factor(factor, right) * (1 + 1e-6)

    monkeypatch.setattr(solve, "by_factor", poor)
    assert deliver_weight(flat, covariance, KEPT, PRUNED, 0.1, flat @ covariance).mixed is None


@pytest.mark.parametrize("row", range(5))
def test_a_single_row_that_is_off_is_seen(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    covariance, flat = definite(7), torch.randn(5, 7).double()
    by_factor = solve.by_factor

    def off(factor: Tensor, right: Tensor) -> Tensor:
        found = by_factor(factor, right)
        found[:, row] *= 1.01
        return found

    monkeypatch.setattr(solve, "by_factor", off)
    assert deliver_weight(flat, covariance, KEPT, PRUNED, 0.1, flat @ covariance).mixed is None


@pytest.mark.parametrize("place", range(len(KEPT)))
def test_a_single_input_that_is_off_is_seen(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    covariance, flat = definite(7), torch.randn(5, 7).double()
    by_factor = solve.by_factor

    def off(factor: Tensor, right: Tensor) -> Tensor:
        found = by_factor(factor, right)
        found[place] *= 1.01
        return found

    monkeypatch.setattr(solve, "by_factor", off)
    assert deliver_weight(flat, covariance, KEPT, PRUNED, 0.1, flat @ covariance).mixed is None


def test_nothing_that_is_given_changes() -> None:
    covariance, flat = definite(7), torch.randn(5, 7).double()
    mixed = flat @ covariance
    given = [x.clone() for x in (covariance, flat, mixed)]
    deliver_weight(flat, covariance, KEPT, PRUNED, 0.1, mixed)
    assert all(torch.equal(x, y) for x, y in zip((covariance, flat, mixed), given))


def test_a_processor_makes_the_factor_where_the_matrix_was() -> None:
    rows = torch.randn(3, 20, 30, dtype=torch.float64)
    matrices = rows @ rows.mT
    matrices[1, 4, 4] = -1.0
    wanted, flags = torch.linalg.cholesky_ex(matrices)
    factor, failed = cholesky(matrices)
    assert factor.data_ptr() == matrices.data_ptr()
    assert failed.tolist() == flags.tolist() and failed.tolist() != [0, 0, 0]
    for number in (0, 2):
        close(factor[number], wanted[number])


def test_what_stands_between_is_multiplied_in() -> None:
    left, between = torch.randn(70, 5).double(), definite(5)
    sums = torch.eye(70).double()
    found = mirror(add_symmetric(sums, left, left.T, 16, between), 16)
    close(found, torch.eye(70).double() + left @ between @ left.T)


def test_products_that_disagree_with_an_indefinite_covariance_are_left() -> None:
    vectors = torch.linalg.qr(definite(7))[0]
    values = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, -1.0, -2.0]).double()
    covariance, flat = vectors @ torch.diag(values) @ vectors.T, torch.randn(5, 7).double()
    plain = deliver_weight(flat, covariance, KEPT, PRUNED, 1e-6)
    known = deliver_weight(flat, covariance, KEPT, PRUNED, 1e-6, flat @ covariance)
    close(known.weight, plain.weight)


@pytest.mark.parametrize("width", [1, 512, 513, 1100])
def test_products_of_columns_in_blocks(width: int) -> None:
    rows = torch.randn(3, width).double()
    close(gram(rows), rows.T @ rows)


@pytest.mark.parametrize("size", [7, 8, 31, 64])
def test_factors_by_quarters_are_factors(size: int) -> None:
    rows = torch.randn(3, size, size + 5, dtype=torch.float64)
    matrices = rows @ rows.mT
    factor, failed = cholesky(matrices, split=8)
    torch.testing.assert_close(factor, torch.linalg.cholesky(matrices))
    assert failed.tolist() == [0, 0, 0]
    for place in (0, size - 1):  # in the first quarter and in the last
        broken = matrices.clone()
        broken[1, place, place] = -1.0
        assert [bool(flag) for flag in cholesky(broken, split=8)[1]] == [False, True, False]


@pytest.mark.parametrize(("groups", "members"), [(1, 5), (4, 1), (9, 7), (3, 50)])
def test_rows_and_columns_are_regrouped_in_place(groups: int, members: int) -> None:
    size = groups * members
    matrix = torch.arange(float(size * size)).reshape(size, size)
    whole = matrix.reshape(groups, members, groups, members)
    wanted = whole.permute(1, 0, 3, 2).reshape(size, size).clone()
    regroup(matrix, groups, block=4)
    assert torch.equal(matrix, wanted)
