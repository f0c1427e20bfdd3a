"""Linear algebra of the regression: ridge solutions with a fallback, Gram products."""

from __future__ import annotations

import torch
from torch import Tensor

from lbyl.torchkit.fallbacks import note
from lbyl.torchkit.tensors import is_finite

RIDGE = 0.01  # of the mean variance of the kept inputs; 1e-3 … 3e-2 make no difference


def deliver_weight(
    flat: Tensor, covariance: Tensor, kept: Tensor, pruned: Tensor, ridge: float
) -> Tensor:
    """Rows of weights with what the pruned inputs carried written onto the kept ones."""
    if not len(pruned):
        return flat[:, kept]
    carried = flat[:, pruned] @ covariance[pruned][:, kept]
    return flat[:, kept] + solve_ridge(carried, covariance[kept][:, kept], ridge)


def regress(cross: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Coefficients of the pruned on the kept channels."""
    return solve_ridge(cross, kept, ridge)


def solve_ridge(right: Tensor, matrix: Tensor, ridge: float) -> Tensor:
    """right · (matrix + ε I)⁻¹, ε relative to the mean diagonal; float64 throughout.

    Of the positive part where rounding left the matrix indefinite; zeros where nothing helps.
    """
    scale = matrix.diagonal().mean().clamp(min=1e-280)
    eye = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix + max(ridge, 1e-9) * scale * eye)
    if not int(failed):
        solution = torch.cholesky_solve(right.T, factor).T
        if is_finite(solution):
            return solution
    inverse = ridge_inverse(matrix, ridge)
    if inverse is not None and is_finite(solution := right @ inverse):
        note("solved by eigenvalues: the covariance is not positive definite")
        return solution
    note("nothing is delivered: the covariance cannot be inverted")
    return torch.zeros_like(right)


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


GRAM_BLOCK = 512  # columns: enough to keep every core busy


def gram(rows: Tensor) -> Tensor:
    """rows' · rows; where that is large each half of the symmetric product is computed once."""
    width = rows.shape[1]
    if width <= GRAM_BLOCK:
        return rows.T @ rows
    product = rows.new_empty(width, width)
    for first in range(0, width, GRAM_BLOCK):
        stretch = slice(first, first + GRAM_BLOCK)
        part = rows[:, stretch].T @ rows[:, first:]
        product[stretch, first:] = part
        product[first:, stretch] = part.T
    return product
