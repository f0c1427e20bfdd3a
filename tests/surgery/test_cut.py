"""Cutting: the indices that stay, a copy that shares nothing, attributes that are true."""

from __future__ import annotations

import torch
from torch import nn

import lbyl
from lbyl.surgery.cut import cut, sliced, weightless_copy
from lbyl.surgery.indices import consumers_cut, kept_indices, kept_mask, pruned_of, take
from support.networks import build, example, fingerprint

KEPT = {"0": torch.tensor([0, 3, 4, 9])}


def test_kept_channels_become_indices_of_every_axis_that_carries_them() -> None:
    graph = lbyl.trace(build("chain"), example("chain"))
    indices = kept_indices(graph, KEPT)
    touched = {("0.weight", 0), ("3.weight", 1)}
    touched |= {(f"1.{part}", 0) for part in ("weight", "bias", "running_mean", "running_var")}
    assert indices.keys() == touched
    assert all(torch.equal(kept, KEPT["0"]) for kept in indices.values())
    assert [consumer.name for consumer in consumers_cut(graph, indices)] == ["3"]
    mask = kept_mask(graph, KEPT)
    assert int(mask.sum()) == len(mask) - 6  # of the other unit nothing is pruned


def test_columns_behind_a_flatten_follow_their_channel() -> None:
    model = build("flattened")
    graph = lbyl.trace(model, example("flattened"))
    indices = kept_indices(graph, {"0": torch.tensor([1, 6])})
    assert indices["5.weight", 1].tolist() == [*range(16, 32), *range(96, 112)]
    assert take(model[5].weight, "5.weight", indices).shape == (5, 32)


def test_pruned_channels_are_the_others() -> None:
    assert pruned_of(5, torch.tensor([0, 3])).tolist() == [1, 2, 4]
    assert pruned_of(3, torch.arange(3)).tolist() == []


def test_a_cut_is_a_copy_with_true_attributes() -> None:
    model = build("chain")
    before = fingerprint(model)
    graph = lbyl.trace(model, example("chain"))
    slim = cut(model, sliced(model, kept_indices(graph, KEPT)))
    assert (slim[0].out_channels, slim[1].num_features, slim[3].in_channels) == (4, 4, 4)
    assert torch.equal(slim[0].weight, model[0].weight[KEPT["0"]])
    assert torch.equal(slim[3].weight, model[3].weight[:, KEPT["0"]])
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in slim.parameters()}
    assert fingerprint(model) == before


def test_groups_follow_a_depthwise_layer() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)
    )
    graph = lbyl.trace(model, torch.zeros(1, 3, 6, 6))
    slim = cut(model, sliced(model, kept_indices(graph, {"0": torch.tensor([2, 5, 7])})))
    assert (slim[2].groups, slim[2].in_channels, slim[2].out_channels) == (3, 3, 3)
    assert slim(torch.zeros(1, 3, 6, 6)).shape == (1, 4, 4, 4)


def test_a_copy_without_weights_has_the_shapes_alone() -> None:
    model = build("chain")
    shell = weightless_copy(model)
    assert all(a.shape == b.shape for a, b in zip(shell.parameters(), model.parameters()))
    assert shell[0].weight.untyped_storage().nbytes() == 4  # a single number
