"""Moments at a consumer's input, matched to the running statistics of the BatchNorm behind it.

On procedural images a consumer's output has not quite the mean and variance that the training
data gave it; the BatchNorm behind it has both as running statistics. So the inputs' moments are
moved, no further than that takes: the distribution given the output is unchanged, and the output
gets the running mean and variances with the least change of its distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Consumer, Graph
from lbyl.graph.weights import as_matrix
from lbyl.statistics.moments import Moments, Statistics
from lbyl.statistics.solve import gram, symmetric_product
from lbyl.torchkit.fallbacks import at, note
from lbyl.torchkit.processes import from_owner, several, share
from lbyl.torchkit.tensors import is_finite, tensors

DAMPING = 0.01  # of the mean output variance: outputs may outnumber inputs, or repeat each other
LIMITS = (0.25, 4.0)  # a correction of a variance beyond these is not trusted
SMOOTHING = 0.01  # of the Newton step, against outputs that contradict each other
STEPS = 2
HALVINGS = 4


def match_running_stats(model: nn.Module, graph: Graph, statistics: Statistics) -> Statistics:
    """The same statistics with every consumer's moments agreeing with the BatchNorm behind it."""
    state = tensors(model)
    moments = dict(statistics.moments)
    for _, name in share(list(moments)):
        with at(name):
            moments[name] = _matched_at(graph.consumers[name], moments[name], state)
    if several():
        for number, (name, own) in enumerate(moments.items()):
            mean, covariance = (from_owner(x.clone(), number) for x in (own.mean, own.covariance))
            moments[name] = dataclasses.replace(own, mean=mean, covariance=covariance)
    return dataclasses.replace(statistics, moments=moments)


def _matched_at(consumer: Consumer, moments: Moments, state: Mapping[str, Tensor]) -> Moments:
    norm = consumer.norm
    if norm is None or moments.columns is not None:
        return moments
    weight = as_matrix(state[consumer.weight], consumer)
    # The output's variance follows from the inputs' covariance only where every tap is in it.
    if moments.mean.shape != weight.shape[1:]:
        return moments
    mean = state[norm.mean].detach().double()
    if consumer.bias is not None:
        mean = mean - state[consumer.bias].detach().double()
    variance = state[norm.var].detach().double()
    return matched(moments, weight.flatten(1), mean, variance)


def matched(moments: Moments, weight: Tensor, mean: Tensor, variance: Tensor) -> Moments:
    """Moments under which `weight` (outputs, features) gives this mean and about this variance.

    Jeffrey's rule for Gaussians: x given y = W x stays as it is while y's moments are replaced.
    """
    old, centre = moments.covariance.to(weight), moments.mean.flatten().to(weight)
    across = old @ weight.T  # (features, outputs)
    output_variance = (weight * across.T).sum(1)
    if not bool(output_variance.mean() > 0):  # nothing reaches the outputs: nothing to learn from
        return moments
    # A dead output has no variance: nothing is asked of it.
    known = output_variance > 1e-6 * output_variance.mean()
    ratio = torch.where(known, variance / output_variance.clamp(min=1e-300), 1.0).clamp(*LIMITS)
    target, gap = output_variance * ratio, mean - weight @ centre
    noise = DAMPING * output_variance.mean()
    # The same in terms of outputs or of inputs, whichever are fewer.
    if weight.shape[0] <= weight.shape[1]:
        solution = _by_outputs(old, weight, across, target, gap, noise)
    else:
        solution = _by_inputs(old, weight, target, gap, noise, known)
    if solution is None or not is_finite(*solution):  # measured variances drown in rounding
        note("moments are left as measured: running statistics could not be matched")
        return moments
    covariance, shift = solution
    return dataclasses.replace(
        moments,
        mean=(centre + shift).reshape(moments.mean.shape),
        covariance=covariance,
    )


def _by_outputs(
    old: Tensor, weight: Tensor, across: Tensor, target: Tensor, gap: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor] | None:
    """New covariance and what the mean moves by, through the regression of inputs on outputs."""
    output_covariance = weight @ across
    output_covariance.diagonal().add_(noise)
    root, failed = torch.linalg.cholesky_ex(output_covariance)
    if int(failed):
        return None
    regression = torch.cholesky_solve(across.T, root).T
    change = with_diagonal(root, root, target + noise) - output_covariance
    moved = symmetric_product(regression @ change, regression.T)
    return moved.add_(old), regression @ gap


def _by_inputs(
    old: Tensor,
    weight: Tensor,
    target: Tensor,
    gap: Tensor,
    noise: Tensor,
    known: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The same where outputs outnumber inputs; `known` (outputs,) are those that vary at all."""
    eye = torch.eye(len(old), dtype=old.dtype, device=old.device)
    inner, failed = torch.linalg.cholesky_ex(old + 1e-6 * old.diagonal().mean() * eye)
    if int(failed):
        return None
    root = weight @ inner
    outer, failed = torch.linalg.cholesky_ex(eye + root.T @ root / noise)
    if int(failed):
        return None
    shift = inner @ torch.cholesky_solve(root.T @ gap[:, None] / noise, outer)
    if known is not None and not bool(known.all()):
        root, target = root[known], target[known]
    return with_diagonal(inner, root, target), shift[:, 0]


def with_diagonal(inner: Tensor, root: Tensor, diagonal: Tensor) -> Tensor:
    """`inner innerᵀ` changed least, by Kullback and Leibler, so that `root rootᵀ` has a diagonal.

    The answer is inner (I + rootᵀ Λ root)⁻¹ innerᵀ with a diagonal Λ that a few Newton steps find.
    Where the targets contradict each other the smoothed steps serve all outputs on average; each is
    taken only as far as the diagonal comes nearer.
    """
    scale = root.square().sum(1).rsqrt()
    unit, target = root * scale[:, None], diagonal * scale.square()
    eye = torch.eye(root.shape[1], dtype=root.dtype, device=root.device)
    smooth = SMOOTHING * torch.eye(len(scale), dtype=root.dtype, device=root.device)
    shift, factor, half = torch.zeros_like(scale), eye, unit.T
    now = half.square().sum(0)
    misfit = _misfit(now, target)
    for _ in range(STEPS):
        # Newton on the reciprocals, in which one output alone is solved by a single step.
        gap = (now * (now - target) / target)[:, None]
        curvature, failed = torch.linalg.cholesky_ex((half.T @ half).square() + smooth)
        if int(failed):
            break
        step = torch.cholesky_solve(gap, curvature)[:, 0]
        for _ in range(HALVINGS):
            tried, failed = torch.linalg.cholesky_ex(
                eye + unit.T @ ((shift + step)[:, None] * unit)
            )
            if not int(failed):
                new_half = torch.linalg.solve_triangular(tried, unit.T, upper=False)
                new_now = new_half.square().sum(0)
                new_misfit = _misfit(new_now, target)
                if new_misfit < misfit:
                    break
            step = step / 2
        else:  # no step of a sensible length helps: the outputs contradict each other
            break
        shift, factor, half = shift + step, tried, new_half
        now, misfit = new_now, new_misfit
    return gram(torch.linalg.solve_triangular(factor, inner.T, upper=False))


def _misfit(variance: Tensor, target: Tensor) -> float:
    return float((variance / target).log().square().sum())
