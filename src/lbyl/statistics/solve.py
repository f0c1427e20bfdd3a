"""Linear algebra of the regression: ridge solutions with a fallback, Gram products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lbyl.torchkit.assumptions import holds
from lbyl.torchkit.fallbacks import note
from lbyl.torchkit.tensors import is_finite

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
    own = flat[:, kept]
    if mixed is not None:
        delivered = _by_products(own, covariance, kept, ridge, mixed[:, kept])
        if delivered is not None:
            return delivered
    carried = flat[:, pruned] @ covariance[pruned][:, kept]
    return Delivered(own + solve_ridge(carried, covariance[kept][:, kept], ridge))


def _by_products(
    own: Tensor, covariance: Tensor, kept: Tensor, ridge: float, mixed: Tensor
) -> Delivered | None:
    """The same from V_P and (V C)_P; None where the covariance has no Cholesky factor."""
    matrix = covariance[kept][:, kept]
    epsilon, varies = _shift(matrix, ridge), matrix.diagonal().sum() > 0
    right = torch.addcmul(mixed, own, epsilon.expand_as(own))
    solution = _solved(right, matrix, epsilon)
    if solution is None:
        return None
    # Seen at one mixture of the rows, which needs the matrix itself: its factor might be poor.
    some = torch.linspace(-1, 1, len(own), dtype=own.dtype, device=own.device).cos()
    asked, weights = some @ right, some @ solution
    spread = weights.new_zeros(len(covariance)).index_copy(0, kept, weights)
    off = (covariance @ spread)[kept] + epsilon * weights - asked
    if not holds(off.norm() <= SOLVED * asked.norm()):
        return Delivered(solution)
    # Of inputs that never vary the difference is rounding, and nothing would be small beside it.
    return Delivered(solution, (right - epsilon * solution) * varies, mixed)


def regress(cross: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Coefficients of the pruned on the kept channels."""
    return solve_ridge(cross, kept, ridge)


def solve_ridge(right: Tensor, matrix: Tensor, ridge: float) -> Tensor:
    """right · (matrix + ε I)⁻¹, ε relative to the mean diagonal; float64 throughout.

    Of the positive part where rounding left the matrix indefinite; zeros where nothing helps.
    """
    solution = _solved(right, matrix.clone(), _shift(matrix, ridge))
    if solution is not None:
        return solution
    inverse = ridge_inverse(matrix, ridge)
    if inverse is not None and is_finite(product := right @ inverse):
        note("solved by eigenvalues: the covariance is not positive definite")
        return product
    note("nothing is delivered: the covariance cannot be inverted")
    return torch.zeros_like(right)


def _shift(matrix: Tensor, ridge: float) -> Tensor:
    """ε, relative to the mean diagonal."""
    return max(ridge, 1e-9) * matrix.diagonal().mean().clamp(min=1e-280)


def _solved(right: Tensor, matrix: Tensor, epsilon: Tensor) -> Tensor | None:
    """right · (matrix + ε I)⁻¹ by a Cholesky factor, None where there is none; changes matrix."""
    matrix.diagonal().add_(epsilon)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not holds(failed == 0):
        return None
    solution = torch.cholesky_solve(right.T, factor).T
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
    return symmetric_product(rows.T, rows)


def symmetric_product(left: Tensor, right: Tensor, block: int = GRAM_BLOCK) -> Tensor:
    """left · right, which is known to be symmetric, and is so to the last bit."""
    width = len(left)
    if width <= block:
        whole = left @ right
        return (whole + whole.T) / 2
    product = left.new_empty(width, width)
    for first in range(0, width, block):
        stretch = slice(first, first + block)
        part = left[stretch] @ right[:, first:]
        own = part[:, :block]
        own.copy_((own + own.T) / 2)
        product[stretch, first:] = part
        product[first:, stretch] = part.T
    return product
