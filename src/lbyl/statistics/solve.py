"""Linear algebra of the regression: ridge solutions with a fallback, Gram products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lbyl.runtime.assumptions import holds
from lbyl.runtime.notes import note
from lbyl.runtime.rows import convolves, row_products
from lbyl.runtime.tensors import is_finite, onto

SOLVED = 1e-8  # relative residual of what counts as a solution
RIDGE = 0.01  # of the mean variance of the kept inputs; 1e-3 … 3e-2 make no difference


class Delivered(NamedTuple):
    """Weights for the kept inputs, and those times the covariance, where they are known."""

    weight: Tensor  # (o, t)
    mixed: Tensor | None = None  # (o, t): only where the solution was seen to be one
    across: Tensor | None = None  # (o, t): the old weights times the covariance, at these inputs


def deliver_weight(
    flat: Tensor,
    covariance: Tensor,
    kept: Tensor,
    pruned: Tensor,
    ridge: float,
    mixed: Tensor | None = None,
) -> Delivered:
    """Rows of weights with what the pruned inputs carried written onto the kept ones.

    W = V_P + V_Q C_QP (C_PP + εI)⁻¹ = (V C + ε V)_P (C_PP + εI)⁻¹, so that with `mixed` = V C
    nothing is left to multiply: also W C_PP = (V C + ε V)_P − ε W.
    """
    if not len(pruned):
        return Delivered(flat[:, kept], mixed, mixed)
    if mixed is not None:
        delivered = _by_products(flat[:, kept], covariance, kept, ridge, mixed[:, kept])
        if delivered is not None:
            return delivered
    carried = flat[:, pruned] @ covariance[pruned[:, None], kept]
    solved = solve_ridge(carried, covariance[kept[:, None], kept], ridge)
    return Delivered(flat[:, kept] + solved)


def _by_products(
    own: Tensor, covariance: Tensor, kept: Tensor, ridge: float, mixed: Tensor
) -> Delivered | None:
    """The same from V_P and (V C)_P; None where the covariance has no Cholesky factor.

    Changes `own`.
    """
    found = _from_products(own, mixed, covariance[kept[:, None], kept], ridge)
    if not (holds(found.factored) and is_finite(found.weight)):
        return None
    if not holds(found.checked):
        return Delivered(found.weight)
    return Delivered(found.weight, found.mixed, mixed)


class _Products(NamedTuple):
    """New weights, those times the covariance, and whether they are what they should be."""

    weight: Tensor  # (…, o, t)
    mixed: Tensor  # (…, o, t)
    factored: Tensor  # (…,): whether there is a Cholesky factor,
    checked: Tensor  # (…,): and whether the weights were seen to solve


def _from_products(
    own: Tensor, mixed: Tensor, matrix: Tensor, ridge: float, filled: Tensor | None = None
) -> _Products:
    """(V C + εV)_P (C_PP + εI)⁻¹ from V_P, (V C)_P and C_PP, of one problem or of several.

    `filled` (…, t) are flags of rows that stand for nothing, of which only zeros are given.
    Changes `own` and `matrix`: several of their size need not be held.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    total = diagonal.sum(-1)
    count = matrix.shape[-1] if filled is None else (~filled).sum(-1)
    epsilon = _epsilon(total / count, ridge)
    by_row = epsilon[..., None]
    diagonal.add_(by_row if filled is None else torch.where(filled, 1.0, by_row))
    by_row = by_row[..., None]
    right = own.mul_(by_row).add_(mixed)
    # Seen at one mixture of the inputs, of which the matrix itself must tell: its factor, which
    # may take its place, might be poor.
    some = torch.linspace(-1, 1, right.shape[-1], dtype=right.dtype, device=right.device).cos()
    seen = matrix @ some
    factor, failed = cholesky(matrix)
    solution = by_factor(factor, right.mT).mT
    asked = right @ some
    off = (solution @ seen[..., None])[..., 0] - asked
    checked = off.norm(dim=-1) <= SOLVED * asked.norm(dim=-1)
    # Of inputs that never vary the difference is rounding, and nothing would be small beside it.
    varies = (total > 0)[..., None, None]
    times = right.addcmul_(solution, by_row, value=-1).mul_(varies)
    return _Products(solution, times, failed == 0, checked)


SPLIT = 2000  # rows from which a device factors a matrix by quarters; no result depends on it


def cholesky(matrix: Tensor, split: int | None = None) -> tuple[Tensor, Tensor]:
    """The lower factor of a matrix, or of several, and flags other than 0 where there is none.

    On a processor it takes the place of the matrix, which need not be held twice. From `split` rows
    on by quarters, as a device wants it: most of it are then products, which that
    computes ten times as fast as factors.
    """
    size = matrix.shape[-1]
    split = SPLIT if split is None and matrix.is_cuda else split
    if split is None and not matrix.is_cuda:
        factor = matrix.mT  # in the order in which the library wants it
        failed = matrix.new_empty(matrix.shape[:-2], dtype=torch.int32)
        torch.linalg.cholesky_ex(factor, out=(factor, failed))
        return factor, failed
    if split is None or size < split:
        return torch.linalg.cholesky_ex(matrix)
    half = size // 2
    upper, lower = slice(0, half), slice(half, None)
    first, failed = cholesky(matrix[..., upper, upper], split)
    below = torch.linalg.solve_triangular(
        first.mT, matrix[..., lower, upper], upper=True, left=False
    )
    rest = matrix[..., lower, lower] - below @ below.mT
    last, failed_too = cholesky(rest, split)
    factor = torch.zeros_like(matrix)
    factor[..., upper, upper], factor[..., lower, upper] = first, below
    factor[..., lower, lower] = last
    return factor, failed | failed_too


def by_factor(factor: Tensor, right: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ · right, L being a Cholesky factor.

    Not by torch's `cholesky_solve`, which copies the factor and has a device wait.
    """
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True, out=half)


class Regression(NamedTuple):
    """A consumer's weights, to be written onto several choices of its inputs."""

    flat: Tensor  # (o, inputs · taps)
    covariance: Tensor  # of those columns
    mixed: Tensor  # (o, inputs · taps): the weights times the covariance
    kept: Tensor  # (choices, inputs): flags, in the processor's memory
    taps: int  # that belong to an input, and go with it


class Regressed(NamedTuple):
    """Solutions for all choices of several regressions, filled up with zeros to the longest."""

    weight: Tensor  # (b, o, t)
    mixed: Tensor  # (b, o, t): times the covariance
    across: Tensor  # (b, o, t): the old weights times the covariance, at these inputs
    rows: Tensor  # (b, t): of the covariance, that are kept
    good: Tensor  # (b,): whether each was seen to be a solution


def deliver_together(regressions: Sequence[Regression], ridge: float) -> Regressed:
    """`deliver_weight` of several regressions of one shape, with their `mixed`, in one go."""
    inputs, none = _side_by_side(torch.cat([r.kept for r in regressions]))
    device, taps = regressions[0].flat.device, regressions[0].taps
    each = torch.arange(taps, device=device)
    rows = (onto(inputs, device)[..., None] * taps + each).flatten(1)
    filled = onto(none, device).repeat_interleave(taps, 1)
    parts = list(zip(regressions, rows.split([len(r.kept) for r in regressions])))
    empty = filled[:, None, :]
    own, mixed = (
        torch.cat([getattr(r, name)[:, at].transpose(0, 1) for r, at in parts]).masked_fill_(
            empty, 0.0
        )
        for name in ("flat", "mixed")
    )
    matrix = torch.cat([r.covariance[at[:, :, None], at[:, None, :]] for r, at in parts])
    matrix.masked_fill_(empty, 0.0).masked_fill_(filled[:, :, None], 0.0)
    found = _from_products(own, mixed, matrix, ridge, filled)
    good = found.factored & found.checked & found.weight.sum((1, 2)).isfinite()
    return Regressed(found.weight, found.mixed, mixed, rows, good)


def _side_by_side(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Where flags (b, n) are set: (b, t), filled up with zeros, and flags of what is filled."""
    counts = flags.sum(1)
    row, place = flags.nonzero(as_tuple=True)
    at = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    rows = torch.zeros(len(flags), int(counts.max()), dtype=torch.long)
    rows[row, at] = place
    return rows, torch.arange(rows.shape[1]) >= counts[:, None]


def regress(cross: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Coefficients of the pruned on the kept channels."""
    return solve_ridge(cross, kept, ridge)


def solve_ridge(right: Tensor, matrix: Tensor, ridge: float) -> Tensor:
    """right · (matrix + ε I)⁻¹, ε relative to the mean diagonal; float64 throughout.

    Of the positive part where rounding left the matrix indefinite; zeros where nothing helps.
    """
    solution = _solved(right, matrix.clone(), _epsilon(matrix.diagonal().mean(), ridge))
    if solution is not None:
        return solution
    inverse = ridge_inverse(matrix, ridge)
    if inverse is not None and is_finite(product := right @ inverse):
        note("solved by eigenvalues: the covariance is not positive definite")
        return product
    note("nothing is delivered: the covariance cannot be inverted")
    return torch.zeros_like(right)


def _epsilon(mean_diagonal: Tensor, ridge: float) -> Tensor:
    """ε, relative to the mean diagonal."""
    return max(ridge, 1e-9) * mean_diagonal.clamp(min=1e-280)


def _solved(right: Tensor, matrix: Tensor, epsilon: Tensor) -> Tensor | None:
    """right · (matrix + ε I)⁻¹ by a Cholesky factor, None where there is none; changes matrix."""
    matrix.diagonal().add_(epsilon)
    factor, failed = cholesky(matrix)
    if not holds(failed == 0):
        return None
    solution = by_factor(factor, right.T).T
    return solution if is_finite(solution) else None


def ridge_inverse(matrix: Tensor, ridge: float) -> Tensor | None:
    """(matrix + ε I)⁻¹ of the positive part, ε relative to its mean eigenvalue; None without one.

    Slower than a Cholesky factor and good for every finite symmetric matrix.
    """
    if not is_finite(matrix):
        return None
    smallest = torch.finfo(matrix.dtype).tiny
    scale = matrix.abs().max().clamp(min=smallest)
    try:
        values, vectors = torch.linalg.eigh((matrix / scale + matrix.T / scale) / 2)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no convergence
        return None
    values = values.clamp(min=0)
    values = values + max(ridge, 1e-9) * values.mean()
    inverse = torch.where(values > 0, 1 / values.clamp(min=smallest), 0.0)
    return (vectors * inverse) @ vectors.T / scale


GRAM_BLOCK = 512  # columns: enough to keep every core busy; no result depends on it


def gram(rows: Tensor) -> Tensor:
    """rows' · rows; where that is large each half of the symmetric product is computed once."""
    return symmetric_product(rows.mT, rows)


def symmetric_product(left: Tensor, right: Tensor, block: int = GRAM_BLOCK) -> Tensor:
    """left · right, which is known to be symmetric, and is so to the last bit."""
    sums = left.new_zeros(*left.shape[:-1], left.shape[-2])
    return mirror(add_symmetric(sums, left, right, block), block)


def add_symmetric(
    sums: Tensor,
    left: Tensor,
    right: Tensor,
    block: int = GRAM_BLOCK,
    between: Tensor | None = None,
) -> Tensor:
    """sums += left · right, which is known to be symmetric, but for what `mirror` fills in.

    Where something stands `between` them, it is multiplied in block by block.
    """
    for first in range(0, sums.shape[-1], block):
        stretch = slice(first, first + block)
        rows = left[..., stretch, :] if between is None else left[..., stretch, :] @ between
        part = rows @ right[..., first:]
        own = part[..., : part.shape[-2]]
        own.copy_((own + own.mT) / 2)
        sums[..., stretch, first:] += part
    return sums


def add_gram(sums: Tensor, rows: Tensor, block: int = GRAM_BLOCK) -> Tensor:
    """sums += rows' · rows, but for what `mirror` fills in."""
    if not convolves(rows, rows):
        return add_symmetric(sums, rows.T, rows, block)
    parts = [part.contiguous() for part in rows.split(block, 1)]
    for i, one in enumerate(parts):
        for j, other in enumerate(parts[i:], i):
            here, there = (slice(k * block, (k + 1) * block) for k in (i, j))
            sums[here, there] += row_products(one, other)
    return sums


def mirror(sums: Tensor, block: int = GRAM_BLOCK) -> Tensor:
    """The sums, in place, with what is left of the diagonal taken from the other side."""
    for first in range(0, sums.shape[-1], block):
        stretch, rest = slice(first, first + block), slice(first + block, None)
        own = sums[..., stretch, stretch]
        own.copy_(own.triu() + own.triu(1).mT)
        sums[..., rest, stretch] = sums[..., stretch, rest].mT
    return sums


REGROUPED = 64  # rows or columns at a time, which fit into a cache; no result depends on it


def regroup(matrix: Tensor, groups: int, block: int = REGROUPED) -> None:
    """Rows and columns (groups, members) of a matrix become (members, groups), in place."""
    for rows in matrix.split(block):
        rows.copy_(rows.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1))
    for columns in matrix.split(block, 1):
        columns.copy_(columns.unflatten(0, (groups, -1)).transpose(0, 1).flatten(0, 1))
