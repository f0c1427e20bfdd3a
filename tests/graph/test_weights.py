"""Weights by channel, also where channels own unequally many slices."""

from __future__ import annotations

import torch
from torch import nn

import lbyl
from lbyl.graph.unit import Unit
from lbyl.graph.weights import as_matrix, by_channel, from_matrix, unit_weights
from support.networks import build, example, randomise


def unit(start: int, channels: int) -> Unit:
    return Unit("unit", start, channels, (), (), (), ())


def test_one_slice_a_channel() -> None:
    weight = torch.randn(4, 3, 2)
    found = by_channel(weight, 0, torch.arange(4), unit(0, 4))
    assert torch.equal(found, weight.double().reshape(4, 1, 6))
    reordered = by_channel(weight, 0, torch.tensor([2, 0, 3, 1]), unit(0, 4))
    assert torch.equal(reordered[:, 0], weight.double().flatten(1)[[1, 3, 0, 2]])


def test_columns_along_another_axis_and_of_another_unit() -> None:
    weight = torch.randn(5, 6)
    channel = torch.tensor([7, 7, 3, 8, 8, -1])  # channel 3 and −1 are not the unit's
    found = by_channel(weight, 1, channel, unit(7, 2))
    assert found.shape == (2, 2, 5)
    assert torch.equal(found[0], weight.double().T[:2])
    assert torch.equal(found[1], weight.double().T[3:5])


def test_uneven_channels_are_filled_with_zeros() -> None:
    weight = torch.randn(6, 3)
    channel = torch.tensor([1, 0, 1, 2, 1, 2])
    found = by_channel(weight, 0, channel, unit(0, 4))
    rows = weight.double()
    assert found.shape == (4, 3, 3) and found.dtype == torch.float64
    assert torch.equal(found[0], torch.stack([rows[1], 0 * rows[0], 0 * rows[0]]))
    assert torch.equal(found[1], rows[[0, 2, 4]])
    assert torch.equal(found[2], torch.stack([rows[3], rows[5], 0 * rows[0]]))
    assert not bool(found[3].any())  # a channel without a slice


def test_a_unit_that_an_axis_does_not_carry_has_zeros() -> None:
    found = by_channel(torch.randn(3, 2), 0, torch.tensor([-1, 9, 9]), unit(0, 4))
    assert found.shape == (4, 1, 2) and not bool(found.any())


class Partly(nn.Module):
    """A second reader sees the first half of the channels twice over, the others not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.all, self.some = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        half = x.chunk(2, 1)[0]
        return self.all(x) + self.some(torch.cat([half, half], 1))


def test_consumers_that_read_channels_unevenly_are_read_by_channel() -> None:
    model, x = randomise(Partly()), torch.randn(3, 4)
    graph = lbyl.trace(model, x)
    if not graph.units:  # the halves of a unit cannot be pruned alone
        assert "first" in graph.unprunable
        return
    for name, weights in unit_weights(graph, model).items():
        assert weights.consumer_weights.shape[0] == graph[name].channels
        assert bool(weights.consumer_weights.isfinite().all())
    slim = lbyl.compress(model, x, 0.5, method="none").model
    assert slim(x).shape == (3, 2)


def test_matrices_come_back_from_every_kind_of_layer() -> None:
    layers = {"linear": nn.Linear(5, 3), "conv": nn.Conv2d(5, 3, 2)}
    layers["transposed"] = nn.ConvTranspose2d(5, 3, 2)
    for kind, layer in layers.items():
        model = nn.Sequential(nn.Conv2d(2, 5, 1), nn.ReLU(), layer)
        if kind == "linear":
            model[0] = nn.Linear(2, 5)
        x = torch.randn(1, 2, 4, 4) if kind != "linear" else torch.randn(1, 2)
        consumer = lbyl.trace(model, x).consumers["2"]
        matrix = as_matrix(layer.weight, consumer)
        assert matrix.shape == (3, 5, 1 if kind == "linear" else 4)
        back = from_matrix(matrix, consumer, layer.weight)
        assert torch.equal(back.float(), layer.weight)


def test_folded_filters_are_what_the_activation_sees() -> None:
    model, x = build("chain"), example("chain", 5)
    weights = unit_weights(lbyl.trace(model, x), model)["0"]
    patches = nn.functional.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1).double()
    ones = torch.ones(len(patches), 1, dtype=torch.float64)
    with torch.no_grad():
        wanted = model[:2](x).flatten(2).transpose(1, 2).flatten(0, 1).double()
    found = torch.cat([patches, ones], 1) @ weights.folded.T
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
