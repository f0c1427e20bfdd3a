"""Moments of a unit's channels, from a consumer that reads all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lbyl
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.statistics.moments import Moments, Statistics
from lbyl.statistics.units import (
    first_positions,
    measured_consumers,
    unit_covariance,
    unit_moments,
)
from support.networks import build, example


@pytest.fixture
def halves() -> UnitWeights:
    """Of six channels one consumer reads the first four, another all in another order."""
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    weights = unit_weights(lbyl.trace(model, torch.zeros(1, 3, 4, 4)), model)["0"]
    reads = weights.graph.consumers["2"]
    channels = {"some": torch.arange(4), "every": torch.tensor([3, 4, 5, 0, 1, 2])}
    consumers = {
        name: replace(reads, name=name, channel=weights.unit.start + channel)
        for name, channel in channels.items()
    }
    graph = replace(weights.graph, consumers=consumers)
    return replace(weights, graph=graph, unit=replace(weights.unit, consumers=tuple(consumers)))


def square(size: int) -> Moments:
    rows = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(size)).double()
    return Moments(rows.mean(0)[:, None], torch.cov(rows.T))


def test_only_who_reads_all_channels_is_asked(halves: UnitWeights) -> None:
    measured = Statistics({"some": square(4), "every": square(6)})
    (consumer, moments, index), *others = measured_consumers(halves, measured)
    assert consumer.name == "every" and not others and moments is measured.moments["every"]
    assert index.tolist() == [3, 4, 5, 0, 1, 2]  # where each channel lies
    found = unit_moments(halves, measured)
    assert found is not None
    mean, covariance = moments.channel_level()
    assert torch.equal(found[0], mean[index])
    assert torch.equal(found[1], covariance[index][:, index])
    assert torch.equal(unit_covariance(halves, measured), found[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("measured", [None, Statistics({}), Statistics({"some": square(4)})])
def test_without_such_a_consumer_nothing_is_known(
    halves: UnitWeights, measured: Statistics | None
) -> None:
    assert list(measured_consumers(halves, measured)) == []
    assert unit_moments(halves, measured) is None and unit_covariance(halves, measured) is None


def test_of_columns_grouped_by_channel_one_stands_for_all() -> None:
    model = build("flattened")
    weights = unit_weights(lbyl.trace(model, example("flattened")), model)["0"]
    columns = torch.arange(128).reshape(8, 16).flip(0)
    grouped = Moments(torch.zeros(8, 1), torch.eye(8), 1, None, columns)
    ((_, _, index),) = measured_consumers(weights, Statistics({"5": grouped}))
    assert index.tolist() == list(range(7, -1, -1))
    plain = Moments(torch.zeros(128, 1), torch.eye(128))
    ((_, _, index),) = measured_consumers(weights, Statistics({"5": plain}))
    assert index.tolist() == list(range(0, 128, 16))


def test_each_channel_is_found_where_it_first_lies(halves: UnitWeights) -> None:
    unit = halves.unit
    channel = torch.tensor([2, 0, -1, 1, 0, 3, 5, 4, 5]) + unit.start
    channel[2] = -1
    found = first_positions(channel, unit)
    assert found is not None and found.tolist() == [1, 3, 0, 5, 7, 6]
    assert first_positions(channel[:-2], unit) is None
