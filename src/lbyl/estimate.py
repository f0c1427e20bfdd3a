"""Before deciding: what each method would lose in each layer at each ratio, without data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.criteria import Criterion, criteria
from lbyl.errors import errors
from lbyl.ratios import kept_count
from lbyl.record import Inputs
from lbyl.restore import Method
from lbyl.restore import methods as registry
from lbyl.restore.base import pruned_of
from lbyl.restore.echo import unit_moments
from lbyl.statistics import Statistics, collect
from lbyl.trace import trace
from lbyl.unit import Graph
from lbyl.weights import UnitWeights, unit_weights


@dataclass(frozen=True)
class EstimateRow:
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
class Estimate:
    """Predicted errors, to print or to plan by."""

    rows: tuple[EstimateRow, ...]
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


def estimate(
    model: nn.Module,
    example_inputs: Inputs,
    ratios: Sequence[float] = (0.1, 0.3, 0.5),
    *,
    methods: Sequence[str | Method] = ("none", "neuron-merging", "lbyl", "echo"),
    criterion: str | Criterion = "l2",
    statistics: Statistics | None = None,
    graph: Graph | None = None,
    calibration: Iterable[Any] | Tensor | None = None,
    seed: int = 0,
) -> Estimate:
    """RE, BE, ‖s‖ and WARE of every unit, ratio and method; nothing is cut.

    WARE comes from the moments of the channels on procedural images (or on `calibration`): the
    root mean square of what restoration misses over that of the channel, averaged over all
    channels of the unit, kept ones counting as exact.
    """
    graph = graph or trace(model, example_inputs)
    if statistics is None:
        statistics = collect(model, example_inputs, graph=graph, calibration=calibration, seed=seed)
    chosen, hows = criteria.resolve(criterion), [registry.resolve(m) for m in methods]
    rows = []
    for name, weights in unit_weights(graph, model).items():
        channels = graph[name].channels
        for ratio in ratios:
            count = kept_count(channels, ratio)
            kept = chosen.select(weights, count, statistics)
            for how in hows:
                mine = how.select(weights, count) if how.chooses else kept
                matrix = how.deliver(weights, mine, statistics).matrix
                found = errors(weights, mine, matrix)
                ware = moment_ware(weights, mine, matrix, statistics)
                rows.append(
                    EstimateRow(
                        name,
                        ratio,
                        how.name,
                        len(mine),
                        channels,
                        found.residual,
                        found.bias,
                        found.norm,
                        ware,
                    )
                )
    return Estimate(tuple(rows), statistics.source)


def moment_ware(
    weights: UnitWeights, kept: Tensor, matrix: Tensor, statistics: Statistics
) -> float:
    """Weighted average reconstruction error of a unit from second moments, NaN where unknown."""
    found = unit_moments(weights, statistics)
    if found is None:
        return float("nan")
    mean, covariance = found
    gone = pruned_of(len(covariance), kept).to(matrix.device)
    if not len(gone):
        return 0.0
    second = (covariance + torch.outer(mean, mean)).to(matrix)
    s, stay = matrix[gone], kept.to(matrix.device)
    missed = (
        second[gone, gone]
        - 2 * (s * second[gone][:, stay]).sum(1)
        + ((s @ second[stay][:, stay]) * s).sum(1)
    ).clamp(min=0)
    # A channel that is all but dead has no scale of its own to be measured by.
    least = 1e-2 * second.diagonal().mean().clamp(min=1e-30)
    ratio = (missed / second[gone, gone].clamp(min=float(least))).sqrt()
    return float(ratio.sum() / len(covariance))
