"""`lbyl`: each pruned filter leaves its information to all remaining ones, in closed form.

Two variants. `theorem` is the published mathematics. `released` is what the authors' public code
computes, which the hyperparameters printed in the paper were tuned for. In both, all pruned
filters of a layer share one eigendecomposition: their systems differ only by a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.methods.base import Delivery, Method, identity_rows, registry
from lbyl.runtime.notes import note
from lbyl.runtime.tensors import onto
from lbyl.statistics.solve import symmetric_product
from lbyl.surgery.indices import pruned_of

if TYPE_CHECKING:
    from lbyl.graph.weights import NormWeights, UnitWeights
    from lbyl.statistics.moments import Statistics


BLOCKS, LEAST_BLOCK = 4, 32  # of filters whose products are computed together
TINY = 1e-6  # under it a γ cannot be divided by; the published code fails there


@registry.register("lbyl")
@dataclass(frozen=True)
class LBYL(Method):
    """minimise ‖E‖² + λ₁‖B‖² + λ₂‖s‖² for every pruned filter (docs/how-it-works.md)."""

    lambda1: float = 1e-5
    lambda2: float = 2e-3
    variant: str = "theorem"
    in_threads: ClassVar[bool] = True  # how fast units are delivered: no result depends on it

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
        return self.deliver_alike([(weights, kept)], statistics)[0]

    def alike(self, weights: UnitWeights, kept: Tensor) -> tuple[int, int, bool]:
        return weights.unit.channels, len(kept), weights.norm is None

    def deliver_alike(
        self, units: Sequence[tuple[UnitWeights, Tensor]], statistics: Statistics | None
    ) -> list[Delivery]:
        matrices = [identity_rows(w.unit.channels, kept, w.filters) for w, kept in units]
        pruned = [pruned_of(w.unit.channels, kept) for w, kept in units]
        if len(pruned[0]):
            device = matrices[0].device
            moved = onto(torch.stack(pruned), device)
            solved = self._solve([w for w, _ in units], _on(units, device), moved)
            for matrix, rows, values in zip(matrices, moved, solved):
                matrix[rows] = values
        return [Delivery(matrix) for matrix in matrices]

    def _solve(
        self, units: Sequence[UnitWeights], kept: Tensor, pruned: Tensor
    ) -> Iterable[Tensor]:
        """(pruned, kept) of each unit: all have the same sizes."""
        norms = [w.norm for w in units if w.norm is not None]
        if not norms:
            return [self._without_norm(w, k, p) for w, k, p in zip(units, kept, pruned)]
        products = torch.stack([products_of(w.filters) for w in units])
        inner, across = taken(products, kept, kept), taken(products, kept, pruned)
        if self.variant == "released":
            return self._released(inner, across, norms, kept, pruned)
        return self._theorem(inner, across, norms, kept, pruned)

    def _without_norm(self, weights: UnitWeights, kept: Tensor, pruned: Tensor) -> Tensor:
        filters = weights.filters_with_bias
        if self.variant == "released":  # a ridge regression with intercept
            filters = filters - filters.mean(1, keepdim=True)
        return ridge(filters[kept], filters[pruned], self.lambda2)

    def _theorem(
        self,
        inner: Tensor,
        across: Tensor,
        norms: Sequence[NormWeights],
        kept: Tensor,
        pruned: Tensor,
    ) -> Tensor:
        """(G + λ₁a²p₀p₀ᵀ + λ₂a²I) s = X₀ᵀy₀ + λ₁a²(p₀)_j p₀ with a = γ_j/σ_j.

        This is the paper's system times a², so that nothing is divided by γ_j. `inner` and `across`
        are products of kept filters with kept and with pruned ones, of every unit.
        """
        scale, shift = (torch.stack([getattr(n, w) for n in norms]) for w in ("scale", "shift"))
        a, mine = scale.gather(1, pruned), scale.gather(1, kept)
        values, vectors = eigen(inner * mine[:, :, None] * mine[:, None])
        q = vectors.mT @ shift.gather(1, kept)[:, :, None]  # (units, t, 1)
        right = vectors.mT @ (across * mine[:, :, None] * a[:, None])  # (units, t, pruned)
        a2 = a.square()[:, None]
        inverse = reciprocal(values[:, :, None] + self.lambda2 * a2, values)
        solved, along = inverse * right, inverse * q
        # Sherman–Morrison for the rank-one terms of both sides together: apart, they would be
        # large numbers that cancel.
        strength = self.lambda1 * a2
        missing = shift.gather(1, pruned)[:, None] - q.mT @ solved
        factor = strength * missing / (1 + strength * (q.mT @ along))
        return (vectors @ (solved + along * factor)).mT

    def _released(
        self,
        inner: Tensor,
        across: Tensor,
        norms: Sequence[NormWeights],
        kept: Tensor,
        pruned: Tensor,
    ) -> Tensor:
        """(G + a²M) s = Xᵀf_j + λ₁a(aμ_j − β_j)p, M = diag(λ₁pᵀp + λ₂(σ/γ)²), σ = running_var."""
        var, given, mean, beta = (
            torch.stack([getattr(n, word) for n in norms])
            for word in ("var", "gamma", "mean", "beta")
        )
        sigma = var.clamp(min=1e-12)
        small = given.abs() < TINY
        gamma = torch.where(small, torch.full_like(given, TINY), given)
        ratio = sigma / gamma
        p = torch.where(small, torch.zeros_like(gamma), mean - ratio * beta).gather(1, kept)
        own = p.square().sum(1, keepdim=True)
        weight = self.lambda1 * own + self.lambda2 * ratio.gather(1, kept).square()
        a = given.gather(1, pruned) / sigma.gather(1, pruned)
        constant = a * (a * mean.gather(1, pruned) - beta.gather(1, pruned))
        right = across + self.lambda1 * p[:, :, None] * constant[:, None]
        root = weight.clamp(min=1e-30).rsqrt()[:, :, None]
        values, vectors = eigen(inner * root * root.mT)
        inverse = reciprocal(values[:, :, None] + a.square()[:, None], values)
        solved = inverse * (vectors.mT @ (root * right))
        return (root * (vectors @ solved)).mT


def _on(units: Sequence[tuple[UnitWeights, Tensor]], device: torch.device) -> Tensor:
    """(units, t): the kept channels of each."""
    return onto(torch.stack([kept for _, kept in units]), device)


def products_of(filters: Tensor) -> Tensor:
    """(m, m): of every filter with every other; a processor computes each pair once."""
    block = len(filters) if filters.is_cuda else max(LEAST_BLOCK, len(filters) // BLOCKS)
    return symmetric_product(filters, filters.T, block)


def taken(matrices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(units, r, c): rows and columns of each matrix."""
    each = torch.arange(len(matrices), device=matrices.device)[:, None, None]
    return matrices[each, rows[:, :, None], columns[:, None]]


def eigen(products: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (never negative) and vectors of Gram matrices; zeros where there are none."""
    try:
        values, vectors = torch.linalg.eigh(products)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no convergence
        if products.dim() > 2 and len(products) > 1:  # of one of them
            parts = [eigen(one) for one in products]
            return torch.stack([v for v, _ in parts]), torch.stack([v for _, v in parts])
        note("nothing is delivered: the filters' Gram matrix could not be decomposed")
        return torch.zeros_like(products[..., 0]), torch.zeros_like(products)
    return values.clamp(min=0), vectors


def reciprocal(x: Tensor, scale: Tensor) -> Tensor:
    """1/x, but 0 where x is nothing beside `scale`: a direction that holds no information."""
    floor = 1e-13 * scale.amax(-1).clamp(min=1e-300)
    floor = floor.reshape(*floor.shape, *[1] * (x.dim() - floor.dim()))
    return torch.where(x > floor, 1 / x.clamp(min=1e-300), torch.zeros_like(x))


def ridge(known: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Coefficients (targets, known) of ridge regression of rows on rows."""
    values, vectors = eigen(known @ known.T)
    inverse = reciprocal(values + strength, values)
    return ((targets @ known.T) @ vectors * inverse) @ vectors.T
