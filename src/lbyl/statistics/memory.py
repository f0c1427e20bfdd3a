"""Moments at a consumer's input, corrected by what the BatchNorm behind it remembers.

On procedural images a consumer's output has not quite the mean and variance that the training
data gave it; the BatchNorm behind it knows both. So the inputs' moments are moved, no further than
that takes: given the output nothing changes, and the output gets the remembered mean and
deviations with the correlations it showed.
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
    spread = shown.diagonal()
    if not bool(spread.mean() > 0):  # nothing reaches the outputs: nothing to learn from
        return moments
    known = spread > 1e-6 * spread.mean()
    ratio = torch.where(known, variance / spread.clamp(min=1e-300), 1.0).clamp(*LIMITS)
    gain = ratio.sqrt()
    eye = torch.eye(len(spread), dtype=shown.dtype, device=shown.device)
    factor = torch.linalg.cholesky(shown + DAMPING * spread.mean() * eye)
    regression = torch.cholesky_solve(across.T, factor).T  # of inputs on outputs
    change = shown * (torch.outer(gain, gain) - 1)
    old = moments.mean.flatten().to(weight)
    covariance = moments.covariance.to(weight) + regression @ change @ regression.T
    centre = old + regression @ (mean - weight @ old)
    return dataclasses.replace(
        moments,
        mean=centre.reshape(moments.mean.shape),
        covariance=(covariance + covariance.T) / 2,
    )
