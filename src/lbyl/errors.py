"""How far a delivery falls short, from weights alone: RE, BE and ‖s‖ of the paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lbyl.restore.base import pruned_of
from lbyl.weights import UnitWeights


@dataclass(frozen=True)
class Errors:
    """Means over a unit's pruned filters."""

    residual: float  # RE = ‖f_j − Σ_k s_k κ_k f_k‖
    bias: float  # BE = |Σ_k s_k p_k − p_j|
    norm: float  # ‖s_j‖


def errors(weights: UnitWeights, kept: Tensor, matrix: Tensor) -> Errors:
    """RE, BE and ‖s‖ of a delivery matrix, averaged over the pruned channels."""
    gone = pruned_of(weights.unit.channels, kept).to(matrix.device)
    if not len(gone):
        return Errors(0.0, 0.0, 0.0)
    s = matrix[gone]
    norm = weights.norm
    if norm is None:
        rows = weights.filters_with_bias
        gap = rows[gone] - _carried(s, rows, kept)
        return Errors(float(gap.norm(dim=1).mean()), 0.0, float(s.norm(dim=1).mean()))
    scaled = weights.filters * norm.scale[:, None]
    gap = (scaled[gone] - _carried(s, scaled, kept)).norm(dim=1)
    # In the paper's units the gap is divided by γ_j/σ_j; filters switched off by γ ≈ 0 have none.
    scale = norm.scale[gone].abs()
    live = scale > 1e-8
    residual = (gap[live] / scale[live]).mean() if bool(live.any()) else torch.zeros(())
    shift = (s @ norm.shift[kept.to(gone.device)] - norm.shift[gone]).abs()
    return Errors(float(residual), float(shift.mean()), float(s.norm(dim=1).mean()))


def _carried(s: Tensor, rows: Tensor, kept: Tensor) -> Tensor:
    """What kept rows deliver for pruned ones; nothing is multiplied where nothing is delivered."""
    if not bool(s.any()):
        return s.new_zeros(())
    return s @ rows[kept.to(s.device)]
