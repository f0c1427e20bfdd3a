"""The closed form against the published loop, on the same layers and in one run.

The published program takes filter after filter: each builds its system, the kept filters' products
with themselves included, and inverts it. Here all pruned filters of a layer share one
eigendecomposition.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.speed.clock import Rates, best
from lbyl.graph.unit import Graph
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.methods.lbyl import LBYL
from lbyl.planning.criteria import L2
from lbyl.restoring.rewrite import deliver_all
from lbyl.surgery.indices import pruned_of
from lbyl.tracing.trace import trace

METHOD = LBYL(variant="released")
SAMPLE = 3  # filters of a unit by which its loop is timed: of 4,096 channels all would take an hour


def filter_by_filter(
    weights: UnitWeights, kept: Tensor, some: int | None = None
) -> np.ndarray[Any, Any]:
    """(m, t): the released variant as a loop over pruned filters, or some of them, in NumPy."""
    filters = weights.filters.cpu().numpy()
    channels = filters.shape[0]
    stay = kept.cpu().numpy()
    matrix = np.zeros((channels, len(stay)))
    matrix[stay, np.arange(len(stay))] = 1
    norm = weights.norm
    if norm is None:
        raise ValueError("the loop is timed on layers with BatchNorm")
    gamma, beta, mean, sigma = (
        value.cpu().numpy() for value in (norm.gamma, norm.beta, norm.mean, norm.var)
    )
    known = filters[stay]
    ratio = sigma[stay] / gamma[stay]
    p = mean[stay] - ratio * beta[stay]
    for j in pruned_of(channels, kept).tolist()[:some]:
        a = gamma[j] / sigma[j]
        penalty = METHOD.lambda1 * (p @ p) + METHOD.lambda2 * ratio**2
        system = known @ known.T + a**2 * np.diag(penalty)
        right = known @ filters[j] + METHOD.lambda1 * a * (a * mean[j] - beta[j]) * p
        matrix[j] = np.linalg.inv(system) @ right
    return matrix


def randomised(model: nn.Module) -> nn.Module:
    """BatchNorms far from their defaults, as training leaves them."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in (
                (module.weight, 0.2),
                (module.running_var, 0.2),
                (module.running_mean, -0.5),
                (module.bias, -0.5),
            ):
                assert tensor is not None
                tensor.data.copy_(low + torch.rand(tensor.shape, generator=generator))
    return model.eval()


def networks() -> dict[str, nn.Module]:
    """What is timed: published networks, and one wide layer."""
    from torchvision import models

    wide = nn.Sequential(
        nn.Conv2d(64, 4096, 3, bias=False),
        nn.BatchNorm2d(4096),
        nn.ReLU(),
        nn.Conv2d(4096, 8, 1),
    )
    made: dict[str, nn.Module] = {name: models.get_model(name) for name in ("resnet34", "resnet50")}
    made |= {"resnet101": models.resnet101(), "vgg16_bn": models.vgg16_bn()}
    return {name: randomised(model) for name, model in {**made, "4,096 channels": wide}.items()}


def example_of(name: str) -> Tensor:
    return torch.zeros(1, 64, 8, 8) if "channels" in name else torch.zeros(1, 3, 224, 224)


Work = list[tuple[UnitWeights, Tensor]]


def work_of(model: nn.Module, graph: Graph, ratio: float) -> Work:
    """Every unit with BatchNorm, and which of its channels stay."""
    made = []
    for weights in unit_weights(graph, model).values():
        if weights.norm is not None:
            count = max(1, int(weights.unit.channels * (1 - ratio)))
            made.append((weights, L2().select(weights, count, None)))
    return made


def flops(work: Work) -> float:
    """Of the closed form: products, one eigendecomposition (9 t³), coefficients."""
    total = 0.0
    for weights, kept in work:
        (m, d), t = weights.filters.shape, len(kept)
        total += 2 * t * d * m + 9 * t**3 + 4 * t * t * (m - t)
    return total


def moved(work: Work) -> float:
    """Bytes that must be read and written at least: filters once, and the matrix."""
    return sum(8.0 * (w.filters.numel() + w.unit.channels * len(k)) for w, k in work)


def _loop_seconds(weights: UnitWeights, kept: Tensor) -> float:
    """What the loop takes for one unit: some filters are timed, and all cost the same."""
    pruned = weights.unit.channels - len(kept)
    some = min(SAMPLE, pruned)
    return best(partial(filter_by_filter, weights, kept, some), "cpu") * pruned / some


def compare(device: str, only: list[str], ratio: float, loop: bool) -> list[list[Any]]:
    """Rows of network, seconds of the loop, of ours, their ratio, and rates."""
    rates = Rates.measured(device)
    rows = []
    for name, model in networks().items():
        if only and name not in only:
            continue
        model = model.to(device)
        graph = trace(model, example_of(name).to(device))
        work = work_of(model, graph, ratio)

        units = {weights.unit.name: (weights, kept) for weights, kept in work}

        def ours(units: dict[str, tuple[UnitWeights, Tensor]] = units) -> None:
            deliver_all(METHOD, units, None)

        seconds = best(ours, device)
        slow = None
        if loop:
            slow = sum(_loop_seconds(weights, kept) for weights, kept in work)
        done, bytes_moved = flops(work), moved(work)
        rows.append(
            [
                name,
                len(work),
                slow,
                seconds,
                None if slow is None else slow / seconds,
                done / 1e9,
                100 * done / seconds / rates.float64,
                bytes_moved / 1e6,
                100 * bytes_moved / seconds / rates.bytes,
            ]
        )
    return rows


COLUMNS = [
    "network", "units", "loop, s", "ours, s", "ratio", "GFLOP", "% of matmul", "MB", "% of memory",
]  # fmt: skip
