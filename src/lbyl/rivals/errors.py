"""Errors of a delivery: RE, BE and ‖s‖ from weights, WARE from moments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lbyl.graph.weights import UnitWeights
from lbyl.statistics.moments import Statistics
from lbyl.statistics.units import unit_moments
from lbyl.surgery.indices import pruned_of


@dataclass(frozen=True)
class ErrorTerms:
    """Means over a unit's pruned filters."""

    residual: float  # RE = ‖f_j − Σ_k s_k κ_k f_k‖
    bias: float  # BE = |Σ_k s_k p_k − p_j|
    norm: float  # ‖s_j‖


def error_terms(weights: UnitWeights, kept: Tensor, matrix: Tensor) -> ErrorTerms:
    """RE, BE and ‖s‖ of a delivery matrix, averaged over the pruned channels."""
    pruned = pruned_of(weights.unit.channels, kept).to(matrix.device)
    if not len(pruned):
        return ErrorTerms(0.0, 0.0, 0.0)
    s = matrix[pruned]
    norm = weights.norm
    if norm is None:
        rows = weights.filters_with_bias
        gap = rows[pruned] - _carried(s, rows, kept)
        return ErrorTerms(float(gap.norm(dim=1).mean()), 0.0, float(s.norm(dim=1).mean()))
    scaled = weights.filters * norm.scale[:, None]
    gap = (scaled[pruned] - _carried(s, scaled, kept)).norm(dim=1)
    # In the paper's units the gap is divided by γ_j/σ_j; filters switched off by γ ≈ 0 have none.
    scale = norm.scale[pruned].abs()
    nonzero = scale > 1e-8
    residual = (gap[nonzero] / scale[nonzero]).mean() if bool(nonzero.any()) else torch.zeros(())
    shift = (s @ norm.shift[kept.to(pruned.device)] - norm.shift[pruned]).abs()
    return ErrorTerms(float(residual), float(shift.mean()), float(s.norm(dim=1).mean()))


def _carried(s: Tensor, rows: Tensor, kept: Tensor) -> Tensor:
    """What kept rows deliver for pruned ones; nothing is multiplied where nothing is delivered."""
    if not bool(s.any()):
        return s.new_zeros(())
    return s @ rows[kept.to(s.device)]


def moment_ware(
    weights: UnitWeights, kept: Tensor, matrix: Tensor, statistics: Statistics
) -> float:
    """Weighted average reconstruction error of a unit from second moments, NaN where unknown."""
    moments = unit_moments(weights, statistics)
    if moments is None:
        return float("nan")
    mean, covariance = moments
    pruned = pruned_of(len(covariance), kept).to(matrix.device)
    if not len(pruned):
        return 0.0
    second = (covariance + torch.outer(mean, mean)).to(matrix)
    s, kept = matrix[pruned], kept.to(matrix.device)
    missed = (
        second[pruned, pruned]
        - 2 * (s * second[pruned][:, kept]).sum(1)
        + ((s @ second[kept][:, kept]) * s).sum(1)
    ).clamp(min=0)
    # A channel that is all but dead has no scale of its own to be measured by.
    least = 1e-2 * second.diagonal().mean().clamp(min=1e-30)
    ratio = (missed / second[pruned, pruned].clamp(min=float(least))).sqrt()
    return float(ratio.sum() / len(covariance))
