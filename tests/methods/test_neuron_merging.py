"""`neuron-merging`: the published rule, written out pair by pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lbyl
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.surgery.indices import pruned_of
from support.networks import build, example


def layer(name: str, unit: str, seed: int) -> UnitWeights:
    model = build(name, seed)
    return unit_weights(lbyl.trace(model, example(name)), model)[unit]


def pair_by_pair(weights: UnitWeights, kept: list[int], j: int, variant: str) -> Tensor:
    """The row of S for pruned j, with Python loops and plain numbers."""
    f, norm = weights.filters, weights.norm
    assert norm is not None
    sigma = norm.var if variant == "released" else norm.sigma
    cosines, distances, scales = [], [], []
    for k in kept:
        ratio = float(f[j].norm() / f[k].norm())
        factor = (norm.gamma[j] / norm.gamma[k]) * (sigma[k] / sigma[j])
        scale = ratio / float(factor) if variant == "released" else ratio * float(factor)
        centre = norm.mean[j] - sigma[j] * norm.beta[j] / norm.gamma[j]
        gap = norm.gamma[k] / sigma[k] * (ratio * centre - norm.mean[k]) + norm.beta[k]
        cosines.append(float(f[j] @ f[k] / (f[j].norm() * f[k].norm())))
        distances.append(abs(float(gap)) / scale)
        scales.append(scale)
    low, high = min(distances), max(distances)
    scores = [0.85 * (1 - c) + 0.15 * (d - low) / (high - low) for c, d in zip(cosines, distances)]
    best = min(range(len(kept)), key=scores.__getitem__)
    row = torch.zeros(len(kept), dtype=torch.float64)
    row[best] = scales[best] if cosines[best] >= 0.1 else 0.0
    return row


@pytest.mark.parametrize("variant", ["released", "corrected"])
@given(st.integers(0, 10_000))
def test_delivery_is_the_published_rule(variant: str, seed: int) -> None:
    weights = layer("chain", "0", seed)
    kept = torch.tensor([0, 2, 3, 6, 9])
    found = lbyl.methods.NeuronMerging(variant=variant).deliver(weights, kept, None).matrix
    for j in pruned_of(10, kept).tolist():
        torch.testing.assert_close(found[j], pair_by_pair(weights, kept.tolist(), j, variant))


def test_without_batchnorm_the_most_similar_neuron_receives() -> None:
    weights = layer("dense", "0", 1)
    kept = torch.arange(8)
    matrix = lbyl.methods.NeuronMerging(threshold=-1.0).deliver(weights, kept, None).matrix
    rows = weights.filters_with_bias
    for j in range(8, 16):
        similar = torch.cosine_similarity(rows[j], rows[kept], dim=1)
        best = int(similar.argmax())
        assert matrix[j].nonzero().flatten().tolist() == [best]
        torch.testing.assert_close(matrix[j, best], rows[j].norm() / rows[best].norm())


def test_what_is_like_no_kept_neuron_is_dropped() -> None:
    weights = layer("dense", "0", 1)
    matrix = (
        lbyl.methods.NeuronMerging(threshold=1.01).deliver(weights, torch.arange(8), None).matrix
    )
    assert bool((matrix[8:] == 0).all())


@pytest.mark.parametrize("variant", ["released", "corrected"])
def test_a_channel_switched_off_neither_gives_nor_receives(variant: str) -> None:
    model = build("chain", 2)
    with torch.no_grad():
        model[0].weight[5] = model[0].weight[0]  # 5's only good match is 0
        model[0].weight[6] = model[0].weight[1]
        model[1].weight[0] = 0.0  # a kept one is off
        model[1].weight[6] = 0.0  # and a pruned one
    weights = unit_weights(lbyl.trace(model, example("chain")), model)["0"]
    method = lbyl.methods.NeuronMerging(variant=variant, threshold=-1.0)
    matrix = method.deliver(weights, torch.arange(5), None).matrix
    assert matrix[5].abs().max() > 0  # the next best receives instead
    assert matrix[5:, 0].abs().max() == 0
    assert matrix[6].abs().max() == 0
    assert matrix.abs().max() < 1e3


@pytest.mark.parametrize("options", [{"variant": "new"}, {"balance": 2.0}])
def test_options_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(lbyl.LbylError, match="neuron-merging"):
        lbyl.methods.NeuronMerging(**options)  # type: ignore[arg-type]
