"""Linear layers behind a flatten that read too many inputs for a covariance of them all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.graph.unit import Consumer
from lbyl.statistics import collect
from lbyl.statistics.collect import FEATURE_LIMIT
from support import quick
from support.networks import build, example, randomise

CHANNELS, SIDE = 8, 25  # 8 · 625 = 5,000 inputs


def wide() -> nn.Module:
    return randomise(
        nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(CHANNELS * SIDE * SIDE, 6),
        )
    )


def images(count: int = 40) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def test_beyond_the_limit_inputs_are_grouped_by_channel() -> None:
    assert CHANNELS * SIDE * SIDE > FEATURE_LIMIT
    model, x = wide().double(), images().double()
    moments = quick.own_statistics(model, x[:2], x).moments["4"]
    assert moments.columns is not None and moments.columns.shape == (CHANNELS, SIDE * SIDE)
    assert moments.covariance.shape == (CHANNELS, CHANNELS) and moments.taps == 1
    with torch.no_grad():
        seen = model[:3](x).movedim(1, -1).flatten(0, -2)  # every position is a sample
    torch.testing.assert_close(moments.mean[:, 0], seen.mean(0), rtol=1e-9, atol=1e-9)
    wanted = torch.cov(seen.T, correction=0)
    torch.testing.assert_close(moments.covariance, wanted, rtol=1e-9, atol=1e-9)
    assert moments.spatial is not None and moments.spatial.shape == (SIDE * SIDE, SIDE * SIDE)
    torch.testing.assert_close(moments.spatial.diagonal(), torch.ones(SIDE * SIDE).double())


def test_duplicated_channels_are_restored_exactly_beyond_the_limit() -> None:
    model, x = wide(), images()
    with torch.no_grad():
        for tensor in (model[0].weight, *model[1].parameters(), *model[1].buffers()):
            if tensor.dim():
                tensor[4:] = tensor[:4]
    plan = lbyl.Plan({"0": torch.arange(4)}, {"0": CHANNELS})
    method = lbyl.methods.Echo(ridge=1e-9)
    slim = lbyl.compress(model, x[:2], plan, method=method, data=x).model
    assert slim[4].in_features == 4 * SIDE * SIDE
    torch.testing.assert_close(slim(x), model(x), rtol=1e-4, atol=1e-4)


def test_columns_of_a_channel_are_served_alike() -> None:
    """Every place of the map takes over what its channel lost, by one matrix of channels."""
    model, x = wide().double(), images().double()
    kept, gone = torch.tensor([0, 2, 3, 6]), torch.tensor([1, 4, 5, 7])
    prepared = lbyl.prepare(model, x[:2], data=x)
    method = lbyl.methods.Echo(correction="mean")
    result = prepared.compress(lbyl.Plan({"0": kept}, {"0": CHANNELS}), method=method)
    covariance = prepared.statistics().moments["4"].covariance
    inner = covariance[kept][:, kept]
    inner = inner + 0.01 * inner.diagonal().mean() * torch.eye(4, dtype=torch.float64)
    share = covariance[gone][:, kept] @ inner.inverse()
    old = model[4].weight.detach().unflatten(1, (CHANNELS, -1))
    wanted = old[:, kept] + torch.einsum("ojp,jt->otp", old[:, gone], share)
    found = result.model[4].weight.detach().unflatten(1, (4, -1))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    # The bias takes what the mean of the output moves by, a channel having one mean everywhere.
    mean = prepared.statistics().moments["4"].mean[:, 0]
    moved = wanted.sum(2) @ mean[kept] - old.sum(2) @ mean
    bias = result.model[4].bias.detach() - model[4].bias.detach()
    torch.testing.assert_close(bias, -moved, rtol=1e-8, atol=1e-10)


def test_it_restores_more_than_nothing() -> None:
    model, x = wide(), images()
    echo = lbyl.compress(model, x[:2], 0.5, data=x).model
    none = lbyl.compress(model, x[:2], 0.5, method="none").model
    wanted = model(x)
    assert (echo(x) - wanted).norm() < (none(x) - wanted).norm()


def test_below_the_limit_the_same_network_has_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("flattened"), example("flattened", 20)
    every = lbyl.prepare(model, x[:2], data=x).statistics().moments["5"]
    assert every.columns is None and every.covariance.shape == (128, 128)
    monkeypatch.setattr(collect, "FEATURE_LIMIT", 100)
    grouped = lbyl.prepare(model, x[:2], data=x).statistics()
    assert grouped.moments["5"].covariance.shape == (8, 8)
    assert lbyl.compress(model, x[:2], 0.5, data=grouped).model(x).isfinite().all()


def grouped_columns(channel: list[int]) -> list[list[int]] | None:
    channels = torch.tensor(channel)
    consumer = Consumer("layer", "layer.weight", None, 1, 0, None, "linear", channels)
    columns = consumer.flattened_columns()
    return None if columns is None else columns.tolist()


def test_channels_that_own_unequal_columns_are_not_grouped() -> None:
    assert grouped_columns([0, 0, 1, 1]) == [[0, 1], [2, 3]]
    assert grouped_columns([1, 0, 1, 0]) == [[1, 3], [0, 2]]
    assert grouped_columns([0, 0, 1]) is None
    assert grouped_columns([0, 0, -1, -1]) is None
    assert grouped_columns([0, 1, 2, 3]) is None
