"""Backward elimination against the definition: refit after every removal, by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.elimination import EchoCriterion, Reach, eliminate, reach
from lbyl.weights import unit_weights
from networks import build, example


def error_after(found: Reach, gone: list[int], ridge: float) -> float:
    """Squared error at the readers when `gone` are refitted on the rest, ridge included."""
    size = len(found.covariance)
    epsilon = ridge * found.covariance.diagonal().mean()
    full = found.covariance + epsilon * torch.eye(size, dtype=torch.float64)
    stay = [i for i in range(size) if i not in gone]
    cross = full[gone][:, stay]
    left = full[gone][:, gone] - cross @ torch.linalg.solve(full[stay][:, stay], cross.T)
    return float((found.weight[gone][:, gone] * left).sum())


def random_reach(size: int, seed: int) -> Reach:
    generator = torch.Generator().manual_seed(seed)

    def gram() -> Tensor:
        rows = torch.randn(3 * size, size, generator=generator, dtype=torch.float64)
        return rows.T @ rows

    return Reach(gram(), gram())


@pytest.mark.parametrize("seed", range(3))
def test_costs_add_up_to_the_error_of_refitting(seed: int) -> None:
    found = random_reach(8, seed)
    gone: list[int] = []
    total = 0.0
    for j, cost in eliminate(found, torch.ones(8, dtype=torch.float64), ridge=0.01):
        best = min(error_after(found, [*gone, i], 0.01) for i in range(8) if i not in gone)
        gone.append(j)
        total += cost
        assert total == pytest.approx(error_after(found, gone, 0.01), rel=1e-8)
        assert error_after(found, gone, 0.01) == pytest.approx(best, rel=1e-8)
    assert len(set(gone)) == 7


def test_importance_moves_a_channel_to_the_end() -> None:
    found = random_reach(6, 1)
    first = next(iter(eliminate(found, torch.ones(6, dtype=torch.float64))))[0]
    importance = torch.ones(6, dtype=torch.float64)
    importance[first] = 1e9
    assert first not in [j for j, _ in eliminate(found, importance)]


def test_a_duplicate_goes_first_and_for_nothing() -> None:
    model, x = build("chain", 0), example("chain")
    graph = lbyl.trace(model, x)
    unit = graph.units[0]
    with torch.no_grad():
        for name, axis in graph.axes:
            if name in dict(model.named_parameters()) | dict(model.named_buffers()):
                channel = graph.axes[name, axis]
                if axis == 0 and bool((channel == unit.start).any()):
                    tensor = dict(model.named_parameters()) | dict(model.named_buffers())
                    tensor[name][1] = tensor[name][0]
    weights = unit_weights(graph, model)[unit.name]
    statistics = lbyl.collect(model, x, graph=graph, images=64)
    order = EchoCriterion(power=0.0).order(weights, statistics)
    found = reach(weights, statistics)
    assert found is not None
    assert order[0][0] in (0, 1)
    total = float((found.weight * found.covariance).sum())
    assert order[0][1] < 0.02 * total
