"""`echo`: restoration from the statistics that the network itself remembers.

Regress what the pruned inputs of a consumer carried on its kept inputs, with the covariance the
original network shows on procedural images. No data, no search, any activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.exceptions import LbylError
from lbyl.restore.base import Delivery, Method, Reading, identity_rows, methods, pruned_of

if TYPE_CHECKING:
    from lbyl.statistics import Moments, Statistics
    from lbyl.unit import Consumer
    from lbyl.weights import UnitWeights

RIDGE = 0.01  # of the mean variance of the kept inputs; 1e-3 … 3e-2 make no difference


@methods.register("echo")
@dataclass(frozen=True)
class Echo(Method):
    """V' = V_P + V_Q C_QP (C_PP + εI)⁻¹, each consumer on its own."""

    ridge: float = RIDGE
    needs_statistics: ClassVar[bool] = True
    default_repair: ClassVar[str] = "network"

    def __post_init__(self) -> None:
        if self.ridge < 0:
            raise LbylError("echo's ridge must not be negative")

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        """The delivery by channel, for the report; consumers are solved in finer detail."""
        matrix = identity_rows(weights.unit.channels, kept, weights.filters)
        gone = pruned_of(weights.unit.channels, kept).to(matrix.device)
        covariance = unit_covariance(weights, statistics)
        if len(gone) and covariance is not None:
            stay = kept.to(matrix.device)
            covariance = covariance.to(matrix)
            matrix[gone] = regress(covariance[gone][:, stay], covariance[stay][:, stay], self.ridge)
        return Delivery(matrix)

    def rewrite(self, reading: Reading) -> Tensor:
        moments = reading.moments
        if moments is None:  # nothing was measured at this consumer
            return super().rewrite(reading)
        weight = moments.arrange(reading.weight)  # (o, features, taps)
        alive = moments.features_alive(reading.alive).to(weight.device)
        if moments.taps == weight.shape[2]:  # every tap is a feature
            rows = moments.spread(alive)
            flat = weight.flatten(1)
        else:  # taps are served alike
            rows = alive
            flat = weight.transpose(1, 2).flatten(0, 1)
        covariance = moments.covariance.to(weight)
        stay, gone = torch.nonzero(rows).reshape(-1), torch.nonzero(~rows).reshape(-1)
        delivered = deliver_weight(flat, covariance, stay, gone, self.ridge)
        if moments.taps == weight.shape[2]:
            new = delivered.unflatten(1, (-1, moments.taps))
        else:
            new = delivered.unflatten(0, (weight.shape[0], -1)).transpose(1, 2)
        return moments.restore_order(new, reading.alive, reading.weight.shape[2])


def deliver_weight(
    flat: Tensor, covariance: Tensor, stay: Tensor, gone: Tensor, ridge: float
) -> Tensor:
    """Rows of weights with what the pruned inputs carried written onto the kept ones."""
    if not len(gone):
        return flat[:, stay]
    carried = flat[:, gone] @ covariance[gone][:, stay]
    return flat[:, stay] + solve_ridge(carried, covariance[stay][:, stay], ridge)


def regress(cross: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Coefficients of the pruned on the kept channels."""
    return solve_ridge(cross, kept, ridge)


def solve_ridge(right: Tensor, matrix: Tensor, ridge: float) -> Tensor:
    """right · (matrix + ε I)⁻¹, ε relative to the mean diagonal; float64 throughout."""
    scale = matrix.diagonal().mean().clamp(min=1e-30)
    eye = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix + max(ridge, 1e-9) * scale * eye)
    if int(failed):  # rounding left it indefinite: a pseudo-inverse is always defined
        return right @ torch.linalg.pinv(matrix, hermitian=True)
    return torch.cholesky_solve(right.T, factor).T


def unit_moments(
    weights: UnitWeights, statistics: Statistics | None
) -> tuple[Tensor, Tensor] | None:
    """Mean (m,) and covariance (m, m) of a unit's channels, where a consumer reads them all."""
    for _, moments, places in measured_readers(weights, statistics):
        mean, covariance = moments.channel_level()
        return mean[places], covariance[places][:, places]
    return None


def measured_readers(
    weights: UnitWeights, statistics: Statistics | None
) -> Iterator[tuple[Consumer, Moments, Tensor]]:
    """Consumers that read all of a unit's channels, what was measured there, and where they are."""
    if statistics is None:
        return
    for consumer in weights.consumers:
        moments = statistics.get(consumer.name)
        if moments is None:
            continue
        channel = consumer.channel
        if moments.columns is not None:
            channel = channel[moments.columns[:, 0]]
        places = first_places(channel, weights.unit.start, weights.unit.channels)
        if places is not None:
            yield consumer, moments, places.to(moments.covariance.device)


def unit_covariance(weights: UnitWeights, statistics: Statistics | None) -> Tensor | None:
    """(m, m): covariance of a unit's channels, None where nothing was measured."""
    found = unit_moments(weights, statistics)
    return None if found is None else found[1]


def first_places(channel: Tensor, start: int, count: int) -> Tensor | None:
    """Where each of a unit's channels first stands among a reader's features."""
    wanted = torch.arange(start, start + count)
    order = torch.argsort(channel, stable=True)
    ranks = torch.searchsorted(channel[order], wanted)
    places = order[ranks.clamp(max=len(order) - 1)]
    return places if torch.equal(channel[places], wanted) else None
