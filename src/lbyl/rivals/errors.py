"""The errors that the paper goes by: RE, BE and ‖s‖ of a delivery from weights, WARE from moments.

They tell layers apart, not methods: one that fits a delivery matrix well can serve the network
badly. `adaptive_ratios` is the paper's pruning by a threshold of WARE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lbyl.api import Prepared
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.methods import Method, resolve
from lbyl.planning import criteria
from lbyl.planning.criteria import Criterion
from lbyl.planning.ratio import kept_count
from lbyl.statistics.moments import Statistics
from lbyl.statistics.units import unit_moments
from lbyl.surgery.indices import pruned_of

MOST = 0.9  # of a unit that is pruned by a threshold


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


@dataclass(frozen=True)
class LayerError:
    """One unit at one ratio under one method."""

    unit: str
    ratio: float
    method: str
    kept: int
    channels: int
    residual: float  # RE
    bias: float  # BE
    norm: float  # mean ‖s‖
    ware: float  # weighted average reconstruction error, 0 … about 1


@dataclass(frozen=True)
class LayerErrors:
    """Errors of single layers, to print or to plan by."""

    rows: tuple[LayerError, ...]
    source: str

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        width = max([len(row.unit) for row in self.rows] + [4])
        lines = [
            f"{'unit':<{width}}  ratio  {'method':<15} {'kept':>11} {'RE':>9} {'BE':>9} {'WARE':>7}"
        ]
        lines += [
            f"{r.unit:<{width}}  {r.ratio:>5.2f}  {r.method:<15} {r.kept:>5}/{r.channels:<5} "
            f"{r.residual:>9.4f} {r.bias:>9.4f} {r.ware:>7.4f}"
            for r in self.rows
        ]
        return "\n".join(lines)


def layer_errors(
    prepared: Prepared,
    ratios: Sequence[float] = (0.1, 0.3, 0.5),
    *,
    methods: Sequence[str | Method] = ("none", "neuron-merging", "lbyl", "echo"),
    criterion: str | Criterion = "l2",
) -> LayerErrors:
    """RE, BE, ‖s‖ and WARE of every unit, ratio and method; nothing is cut.

    WARE comes from the moments of the channels: the root mean square of what restoration misses
    over that of the channel, averaged over all channels of the unit, kept ones counting as exact.
    """
    statistics = prepared.statistics()
    chosen, resolved = criteria.resolve(criterion), [resolve(method) for method in methods]
    rows = []
    for name, weights in unit_weights(prepared.graph, prepared.model).items():
        unit = prepared.graph[name]
        for ratio in ratios:
            count = kept_count(unit.channels, ratio, blocks=unit.blocks)
            by_criterion = chosen.select(weights, count, statistics)
            for method in resolved:
                kept = method.select(weights, count) if method.chooses else by_criterion
                matrix = method.deliver(weights, kept, statistics).matrix
                terms = asdict(error_terms(weights, kept, matrix))
                ware = moment_ware(weights, kept, matrix, statistics)
                sizes = len(kept), unit.channels
                rows.append(LayerError(name, ratio, method.name, *sizes, **terms, ware=ware))
    return LayerErrors(tuple(rows), statistics.source)


def adaptive_ratios(
    prepared: Prepared, threshold: float, method: str | Method = "echo", step: float = 0.05
) -> dict[str, float]:
    """Unit → the largest ratio whose WARE, and that of all smaller ones, is below a threshold."""
    steps = [round(step * i, 6) for i in range(1, round(MOST / step) + 1)]
    return allowed(layer_errors(prepared, steps, methods=(method,)), threshold)


def allowed(errors: LayerErrors, threshold: float) -> dict[str, float]:
    """Unit → the largest ratio before its error passes the threshold."""
    ratios: dict[str, float] = dict.fromkeys((row.unit for row in errors.rows), 0.0)
    stopped: set[str] = set()
    for row in sorted(errors.rows, key=lambda row: row.ratio):
        if row.ware > threshold:
            stopped.add(row.unit)
        elif row.unit not in stopped:
            ratios[row.unit] = row.ratio
    return ratios
