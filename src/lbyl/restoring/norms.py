"""LayerNorm and RMSNorm over fewer channels, put right to first order in their scale and shift.

With u the channels as the whole norm gives them before its scale (γ) and shift (β), the norm over
the kept ones P gives (u_P − ū_P) / s instead of u_P, where ū_P is their mean (0 in an RMSNorm) and
s² = mean_P u² − ū_P². What is known of both is their expectation, from the moments at a layer that
reads the norm: γ becomes γ · √E[s²] and β becomes β + γ · E[ū_P].

Without statistics the pruned channels count as silent: s² is then the number of channels over that
of the kept ones, with which an RMSNorm (but for its ε) computes what it would with zeros in their
place. Where there are statistics, but none of this norm, they count as like the kept ones: s² = 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lbyl.graph.unit import Axis, ChannelNorm, Graph
from lbyl.statistics.moments import Moments, Statistics

LEAST = 1e-3  # of the largest scale: below it a channel's size before it cannot be told


def corrected_norms(
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    state: Mapping[str, Tensor],
    statistics: Statistics | None,
) -> dict[str, Tensor]:
    """Scales and shifts of the kept channels of every norm that loses some."""
    values: dict[str, Tensor] = {}
    for norm in graph.channel_norms:
        kept = indices.get((norm.weight, 0))
        if kept is None:
            continue
        gamma = state[norm.weight].detach().double() + norm.offset
        beta = torch.zeros_like(gamma) if norm.bias is None else state[norm.bias].detach().double()
        kept = kept.to(gamma.device)
        mean, square = gamma.new_zeros(()), gamma.new_tensor(len(gamma) / len(kept))
        if statistics is not None:
            before = _before_scale(_measured(norm, len(gamma), statistics), gamma, beta)
            mean, square = _of_kept(before, kept, norm.centred)
        values[norm.weight] = gamma[kept] * square.sqrt() - norm.offset
        if norm.bias is not None:
            values[norm.bias] = beta[kept] + gamma[kept] * mean
    return values


def _measured(norm: ChannelNorm, channels: int, statistics: Statistics) -> Moments | None:
    """Moments at the first measured layer that reads the norm channel by channel."""
    found = (statistics.get(name) for name in norm.consumers)
    return next((m for m in found if m is not None and len(m.mean) == channels), None)


def _before_scale(
    moments: Moments | None, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Mean (m,) and second moments (m, m) of u, and for which channels they can be told."""
    if moments is None:
        return None
    told = gamma.abs() > LEAST * gamma.abs().max()
    scale = torch.where(told, gamma, torch.ones_like(gamma))
    mean, covariance = (x.to(gamma) for x in moments.channel_level())
    mean = (mean - beta) / scale
    return mean, covariance / torch.outer(scale, scale) + torch.outer(mean, mean), told


def _of_kept(
    before: tuple[Tensor, Tensor, Tensor] | None, kept: Tensor, centred: bool
) -> tuple[Tensor, Tensor]:
    """E[ū_P] and E[s²] of the kept channels."""
    known = kept if before is None else kept[before[2][kept]]
    if before is None or not len(known):
        return torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    mean, second, _ = before
    square = second.diagonal()[known].mean()
    if not centred:
        return torch.zeros_like(square), square
    return mean[known].mean(), (square - second[known][:, known].mean()).clamp(min=1e-12)
