"""What the large tables and global adaptive pruning rest on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lbyl
from benchmarks.adaptive import MOST, adaptive_ratios
from benchmarks.common import paper
from benchmarks.common.networks import LAYERS
from benchmarks.criteria import RATIOS, correlations, methods, spearman, table
from lbyl.models import zoo


def cells(**accuracy: float) -> dict[str, Any]:
    return {
        name.replace("_", "-"): {"accuracy": a, "re": -a, "be": 0.0, "ware": -a, "real ware": -a}
        for name, a in accuracy.items()
    }


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ties share their mean rank: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


def test_random_runs_are_shown_as_their_mean_beside_the_paper() -> None:
    runs = {f"vgg16_cifar10/random-{i}": {"0.1": cells(none=50.0 + i)} for i in (1, 2, 3)}
    runs["vgg16_cifar10/own"] = {"0.1": cells(fold=7.0)}
    line = table(runs, "vgg16_cifar10")["random 10 %"]
    assert line["none"] == pytest.approx(52) and line["fold"] == 7.0
    assert line["paper: lbyl"] == 88.05
    del runs["vgg16_cifar10/random-2"]
    assert not table(runs, "vgg16_cifar10")  # no mean of what is not there


def test_a_perfect_guess_correlates_perfectly() -> None:
    runs = {"n/l2": {"0.1": cells(none=50.0, echo=70.0), "0.3": cells(none=20.0, echo=60.0)}}
    ranks = correlations(runs, "n")
    assert ranks.pop("settings") == 4
    assert all(value == pytest.approx(1) for value in ranks.values())


def test_hyperparameters_are_those_of_the_cell() -> None:
    drawn = {name: method for name, method, _ in methods("resnet50_cifar100", "random-2", 0.4)}
    assert (drawn["lbyl"].lambda1, drawn["lbyl"].lambda2) == (8e-6, 7e-4)
    merging = drawn["neuron-merging"]
    assert (merging.threshold, merging.balance, merging.variant) == (0.4, 0.9, "released")
    plain = {name: method for name, method, _ in methods("resnet50_cifar100", "l2", 0.4)}
    assert (plain["neuron-merging"].threshold, plain["neuron-merging"].balance) == (0.1, 0.85)


@pytest.mark.parametrize(
    ("name", "layers"), [("resnet34_imagenet", 16), ("resnet101_imagenet", 66)]
)
def test_networks_whose_weights_a_person_brings(name: str, layers: int) -> None:
    """Shapes only, on random weights: the inner layers of every block lose what was asked."""
    pytest.importorskip("torchvision")
    model, example = zoo.create(name), torch.zeros(1, 3, 64, 64)
    prepared = lbyl.prepare(model, example, include=LAYERS[name])
    assert len(prepared.graph) == layers
    result = prepared.compress(0.3, method="none")
    assert result.model.layer1[0].conv1.out_channels == 44  # floor(0.7 · 64)
    assert result.model(example).shape == (1, 1000)
    assert result.model.layer4[-1].bn1.num_features == 358
    for figures in paper.ACCURACY[name].values():
        assert all(len(values) == len(RATIOS[name]) for values in figures.values())
    chosen = {column: method for column, method, _ in methods(name, "random-1", 0.2)}
    assert chosen["lbyl"].lambda2 == {16: 0.1, 66: 0.3}[layers]


def test_ratios_grow_while_the_error_allows() -> None:
    model, example = zoo.create("digits", "shipped"), torch.zeros(1, 1, 8, 8)
    prepared = lbyl.prepare(model, example, data=64)
    strict, loose, none = (
        adaptive_ratios(prepared, "echo", threshold) for threshold in (0.05, 0.3, 0.0)
    )
    assert set(none.values()) == {0.0}
    assert all(strict[name] <= loose[name] <= MOST for name in prepared.graph.names)
    assert sum(loose.values()) > sum(strict.values())
    # The chosen ratios keep the promise, and the next step would break it.
    for row in prepared.layer_errors((0.1, 0.2, 0.3, 0.4, 0.5), methods=("echo",)).rows:
        if row.ratio == loose[row.unit]:
            assert row.ware <= 0.3
        if row.ratio == pytest.approx(loose[row.unit] + 0.1):
            assert row.ware > 0.3
