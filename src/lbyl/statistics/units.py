"""Moments of a unit's channels, taken from a consumer that reads them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from lbyl.runtime.tensors import onto

if TYPE_CHECKING:
    from lbyl.graph.unit import Consumer, Unit
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Moments, Statistics


def unit_moments(
    weights: UnitWeights, statistics: Statistics | None
) -> tuple[Tensor, Tensor] | None:
    """Mean (m,) and covariance (m, m) of a unit's channels, where a consumer reads them all."""
    for _, moments, index in measured_consumers(weights, statistics):
        mean, covariance = moments.channel_level()
        return mean[index], covariance[index[:, None], index]
    return None


def measured_consumers(
    weights: UnitWeights, statistics: Statistics | None
) -> Iterator[tuple[Consumer, Moments, Tensor]]:
    """Consumers that read all of a unit's channels, the moments there, and their features."""
    if statistics is None:
        return
    for consumer in weights.consumers:
        moments = statistics.get(consumer.name)
        if moments is None:
            continue
        channel = consumer.channel
        if moments.columns is not None:
            channel = channel[moments.columns[:, 0]]
        features = first_positions(channel, weights.unit)
        if features is not None:
            yield consumer, moments, onto(features, moments.covariance.device)


def unit_covariance(weights: UnitWeights, statistics: Statistics | None) -> Tensor | None:
    """(m, m): covariance of a unit's channels, None where nothing was measured."""
    moments = unit_moments(weights, statistics)
    return None if moments is None else moments[1]


def first_positions(channel: Tensor, unit: Unit) -> Tensor | None:
    """(m,): where each of a unit's channels first occurs along an axis, None where one does not."""
    counts = unit.slice_counts(channel)
    if not bool((counts > 0).all()):
        return None
    return unit.positions(channel)[counts.cumsum(0) - counts]
