"""Moments at a consumer's input, corrected by what the BatchNorm behind it remembers.

On procedural images a consumer's output has not quite the mean and variance that the training
data gave it; the BatchNorm behind it knows both. So the inputs' moments are moved, no further than
that takes: given the output nothing changes, and the output gets the remembered mean and variances
with the least change of its distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lbyl.statistics.base import Moments, Statistics
from lbyl.surgery import as_matrix, tensors
from lbyl.unit import Consumer, Graph

DAMPING = 0.01  # of the mean output variance: outputs may outnumber inputs, or repeat each other
LIMITS = (0.25, 4.0)  # a correction of a variance beyond these is not trusted
SMOOTHING = 0.01  # of the Newton step, against outputs that contradict each other
STEPS = 2
HALVINGS = 4


def recalled(model: nn.Module, graph: Graph, statistics: Statistics) -> Statistics:
    """The same statistics with every consumer's moments agreeing with the BatchNorm behind it."""
    state = tensors(model)
    moments = {
        name: _agreeing(graph.consumers[name], found, state)
        for name, found in statistics.moments.items()
    }
    return dataclasses.replace(statistics, moments=moments)


def _agreeing(consumer: Consumer, moments: Moments, state: Mapping[str, Tensor]) -> Moments:
    norm = consumer.norm
    weight = as_matrix(state[consumer.weight], consumer)
    # The output's variance follows from the inputs' covariance only where every tap is in it.
    whole = moments.columns is None and moments.mean.shape == weight.shape[1:]
    if norm is None or not whole:
        return moments
    mean = state[norm.mean].detach().double()
    if consumer.bias is not None:
        mean = mean - state[consumer.bias].detach().double()
    variance = state[norm.var].detach().double()
    return corrected(moments, weight.flatten(1), mean, variance)


def corrected(moments: Moments, weight: Tensor, mean: Tensor, variance: Tensor) -> Moments:
    """Moments under which `weight` (outputs, features) gives this mean and about this variance.

    Jeffrey's rule for Gaussians: x given y = W x stays as it is while y's moments are replaced.
    """
    across = moments.covariance.to(weight) @ weight.T  # (features, outputs)
    shown = weight @ across
    spread = shown.diagonal().clone()
    if not bool(spread.mean() > 0):  # nothing reaches the outputs: nothing to learn from
        return moments
    noise = DAMPING * spread.mean()
    shown.diagonal().add_(noise)
    known = spread > 1e-6 * spread.mean()
    ratio = torch.where(known, variance / spread.clamp(min=1e-300), 1.0).clamp(*LIMITS)
    wanted = nearest_with_diagonal(shown, spread * ratio + noise)
    # Regression of inputs on outputs.
    regression = torch.cholesky_solve(across.T, torch.linalg.cholesky(shown)).T
    old = moments.mean.flatten().to(weight)
    covariance = moments.covariance.to(weight) + regression @ (wanted - shown) @ regression.T
    centre = old + regression @ (mean - weight @ old)
    return dataclasses.replace(
        moments,
        mean=centre.reshape(moments.mean.shape),
        covariance=(covariance + covariance.T) / 2,
    )


def nearest_with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """The covariance with about this diagonal that is least changed, by Kullback and Leibler.

    It is (matrix⁻¹ + Λ)⁻¹ with a diagonal Λ; a few Newton steps find that. Where outputs outnumber
    inputs no Λ serves all of them, and the smoothed Newton step serves them on average.
    """
    scale = matrix.diagonal().rsqrt()
    unit = matrix * torch.outer(scale, scale)
    wanted = diagonal * scale.square()
    eye = torch.eye(len(scale), dtype=matrix.dtype, device=matrix.device)
    shift, found = torch.zeros_like(scale), unit
    for _ in range(STEPS):
        now = found.diagonal()
        # Newton on the reciprocals, in which one output alone is solved by a single step.
        gap = (now * (now - wanted) / wanted)[:, None]
        curvature = torch.linalg.cholesky(found.square() + SMOOTHING * eye)
        step = torch.cholesky_solve(gap, curvature)[:, 0]
        for _ in range(HALVINGS):
            tried = torch.linalg.solve(eye + unit * (shift + step), unit)
            if _misfit(tried, wanted) < _misfit(found, wanted):
                break
            step = step / 2
        else:  # no step of a sensible length helps: the outputs contradict each other
            break
        shift, found = shift + step, (tried + tried.T) / 2
    return found / torch.outer(scale, scale)


def _misfit(matrix: Tensor, diagonal: Tensor) -> float:
    """How far the diagonal is from the wanted one; infinite where `matrix` is no covariance."""
    if int(torch.linalg.cholesky_ex((matrix + matrix.T) / 2)[1]):
        return torch.inf
    return float((matrix.diagonal() / diagonal).log().square().sum())
