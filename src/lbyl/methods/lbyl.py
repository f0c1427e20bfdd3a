"""`lbyl`: each pruned filter leaves its information to all remaining ones, in closed form.

Two variants. `theorem` is the published mathematics. `released` is what the authors' public code
computes, which the hyperparameters printed in the paper were tuned for. In both, all pruned
filters of a layer share one eigendecomposition: their systems differ only by a scalar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.methods.base import Delivery, Method, identity_rows, registry
from lbyl.surgery.indices import pruned_of
from lbyl.torchkit.fallbacks import note

if TYPE_CHECKING:
    from lbyl.graph.weights import NormWeights, UnitWeights
    from lbyl.statistics.moments import Statistics


TINY = 1e-6  # under it a γ cannot be divided by; the published code fails there


@registry.register("lbyl")
@dataclass(frozen=True)
class LBYL(Method):
    """minimise ‖E‖² + λ₁‖B‖² + λ₂‖s‖² for every pruned filter (docs/how-it-works.md)."""

    lambda1: float = 1e-5
    lambda2: float = 2e-3
    variant: str = "theorem"
    in_threads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("theorem", "released"):
            raise LbylError(f"lbyl has no variant {self.variant!r}: use 'theorem' or 'released'")
        for name in ("lambda1", "lambda2"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise LbylError(f"lbyl's {name} is {value}: it must be finite and not negative")

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        matrix = identity_rows(weights.unit.channels, kept, weights.filters)
        pruned = pruned_of(weights.unit.channels, kept).to(matrix.device)
        kept = kept.to(matrix.device)
        if len(pruned):
            matrix[pruned] = self._solve(weights, kept, pruned)
        return Delivery(matrix)

    def _solve(self, weights: UnitWeights, kept: Tensor, pruned: Tensor) -> Tensor:
        if weights.norm is None:
            filters = weights.filters_with_bias
            if self.variant == "released":  # a ridge regression with intercept
                filters = filters - filters.mean(1, keepdim=True)
            return ridge(filters[kept], filters[pruned], self.lambda2)
        if self.variant == "released":
            return self._released(weights.filters, weights.norm, kept, pruned)
        return self._theorem(weights.filters, weights.norm, kept, pruned)

    def _theorem(self, filters: Tensor, norm: NormWeights, kept: Tensor, pruned: Tensor) -> Tensor:
        """(G + λ₁a²p₀p₀ᵀ + λ₂a²I) s = X₀ᵀy₀ + λ₁a²(p₀)_j p₀ with a = γ_j/σ_j.

        This is the paper's system times a², so that nothing is divided by γ_j.
        """
        scaled = filters * norm.scale[:, None]
        values, vectors = eigen(scaled[kept])
        a2 = norm.scale[pruned] ** 2
        p = norm.shift
        q = vectors.T @ p[kept]
        right = vectors.T @ (scaled[kept] @ scaled[pruned].T)  # (t, pruned)
        inverse = reciprocal(values[:, None] + self.lambda2 * a2, values)
        solved = inverse * right
        along = inverse * q[:, None]
        # Sherman–Morrison for the rank-one terms of both sides together: apart, they would be
        # large numbers that cancel.
        strength = self.lambda1 * a2
        factor = strength * (p[pruned] - q @ solved) / (1 + strength * (q @ along))
        return (vectors @ (solved + along * factor)).T

    def _released(self, filters: Tensor, norm: NormWeights, kept: Tensor, pruned: Tensor) -> Tensor:
        """(G + a²M) s = Xᵀf_j + λ₁a(aμ_j − β_j)p, M = diag(λ₁pᵀp + λ₂(σ/γ)²), σ = running_var."""
        sigma = norm.var.clamp(min=1e-12)
        small = norm.gamma.abs() < TINY
        gamma = torch.where(small, torch.full_like(norm.gamma, TINY), norm.gamma)
        ratio = sigma / gamma
        p = torch.where(small, torch.zeros_like(gamma), norm.mean - ratio * norm.beta)[kept]
        weight = self.lambda1 * (p @ p) + self.lambda2 * ratio[kept] ** 2
        a = norm.gamma[pruned] / sigma[pruned]
        right = filters[kept] @ filters[pruned].T
        right += self.lambda1 * p[:, None] * (a * (a * norm.mean[pruned] - norm.beta[pruned]))
        root = weight.clamp(min=1e-30).rsqrt()
        values, vectors = eigen(filters[kept] * root[:, None])
        inverse = reciprocal(values[:, None] + a**2, values)
        solved = inverse * (vectors.T @ (root[:, None] * right))
        return (root[:, None] * (vectors @ solved)).T


def eigen(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (never negative) and vectors of the Gram matrix of `rows`; zeros without any."""
    product = rows @ rows.T
    try:
        values, vectors = torch.linalg.eigh(product)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no convergence
        note("nothing is delivered: the filters' Gram matrix could not be decomposed")
        return torch.zeros_like(product[0]), torch.zeros_like(product)
    return values.clamp(min=0), vectors


def reciprocal(x: Tensor, scale: Tensor) -> Tensor:
    """1/x, but 0 where x is nothing beside `scale`: a direction that holds no information."""
    floor = 1e-13 * scale.max().clamp(min=1e-300)
    return torch.where(x > floor, 1 / x.clamp(min=1e-300), torch.zeros_like(x))


def ridge(known: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Coefficients (targets, known) of ridge regression of rows on rows."""
    values, vectors = eigen(known)
    inverse = reciprocal(values + strength, values)
    return ((targets @ known.T) @ vectors * inverse) @ vectors.T
