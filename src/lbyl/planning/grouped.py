"""Backward elimination of channels that have several inputs each, seen by several at once.

A head has many columns in the layer that reads it, and a pair of rotary channels two products in
the logit of every head that shares it. So a removal takes several inputs out of several views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lbyl.graph.weights import UnitWeights, as_matrix
from lbyl.statistics.moments import Statistics
from lbyl.statistics.products import pairs_of
from lbyl.statistics.solve import RIDGE, ridge_inverse


@dataclass(frozen=True)
class GroupView:
    """What one consumer, or the logit of one head, makes of channels with several inputs each."""

    covariance: Tensor  # (n, n) of all its inputs
    weight: Tensor  # (n, n): VᵀV
    inputs: Tensor  # (c, r): the inputs of each channel it sees
    channels: Tensor  # (c,): which channels of the unit these are

    @property
    def total(self) -> float:
        """The power of what it makes of all its inputs."""
        return float((self.weight * self.covariance).sum())


def group_views(weights: UnitWeights, statistics: Statistics) -> list[GroupView]:
    """The views of a unit of attention: its consumers', or its logits'."""
    unit, graph = weights.unit, weights.graph
    if unit.kind == "qk":
        return _logit_views(weights, statistics)
    views = []
    for consumer in weights.consumers:
        moments = statistics.get(consumer.name)
        if moments is None or moments.columns is not None or moments.taps != 1:
            continue
        rows = as_matrix(weights.state[consumer.weight], consumer).flatten(1).to(moments.covariance)
        local = torch.unique(unit.local(consumer.channel))
        inputs = graph.columns(unit, consumer)
        if inputs is None:
            continue
        views.append(GroupView(moments.covariance, rows.T @ rows, inputs, local[local >= 0]))
    return views


def _logit_views(weights: UnitWeights, statistics: Statistics) -> list[GroupView]:
    unit, graph = weights.unit, weights.graph
    facts, moments = unit.attention, statistics.products.get(unit.name)
    if moments is None or facts is None:
        return []
    pairs = pairs_of(graph, unit)
    axis = next(p.axis for p in unit.producers if p.weight == facts.query_weight)
    channel = unit.local(graph.axes[facts.query_weight, axis])[facts.query]
    views = []
    for head, row in enumerate(channel):
        count, features = pairs.shape[1], min(pairs.shape[2], 2)
        if facts.plain and features == 1:  # independent queries and keys: E[q_i q_j] E[k_i k_j]
            order = pairs[head, :, 0]
            gram = (moments.query[head] * moments.key[head])[order][:, order]
        else:
            gram = moments.gram[head]
        target = torch.zeros(len(gram), dtype=gram.dtype, device=gram.device)
        target[:count] = 1
        inputs = torch.arange(count)[:, None] + count * torch.arange(features)
        views.append(GroupView(gram, torch.outer(target, target), inputs, torch.unique(row)))
    return views


def eliminate_groups(
    views: list[GroupView], channels: int, ridge: float = RIDGE, block: Tensor | None = None
) -> list[tuple[int, float]]:
    """Channels of several inputs each in the order they are pruned, with what each adds.

    With H = (C + εI)⁻¹ and M = VᵀV of each view a channel of inputs G costs tr(M_GG H_GG⁻¹), and
    its removal changes H ← H − H_G' S H_G and M ← M − s' M_G − M_G' s + s' M_GG s, with S = H_GG⁻¹
    and s = S H_G. Of several blocks each loses one channel before any loses another.
    """
    block = torch.zeros(channels, dtype=torch.long) if block is None else block
    lost = torch.zeros(int(block.max()) + 1)
    inverses = [_inverse(v.covariance.double(), ridge) for v in views]
    grams = [v.weight.double().clone() for v in views]
    costs = [_group_costs(v, h, m) for v, h, m in zip(views, inverses, grams)]
    pruned = torch.zeros(channels, dtype=torch.bool)
    order: list[tuple[int, float]] = []
    while len(order) < channels - 1:
        cost = torch.zeros(channels, dtype=torch.float64)
        for view, mine in zip(views, costs):
            cost[view.channels] += mine.cpu()
        waiting = pruned | (lost > lost.min())[block]
        price = cost.nan_to_num(nan=1e300, posinf=1e300).masked_fill(waiting, torch.inf)
        j = int(price.argmin())
        lost[block[j]] += 1
        order.append((j, float(cost[j].clamp(min=0))))
        pruned[j] = True
        for i, view in enumerate(views):
            at = torch.nonzero(view.channels == j).reshape(-1)
            if not len(at):
                continue
            group = view.inputs[int(at[0])].to(inverses[i].device)
            h, m = inverses[i], grams[i]
            s = torch.linalg.pinv(h[group][:, group], hermitian=True) @ h[group]  # (r, n)
            carried = s.T @ m[group]
            inverses[i] = h - h[:, group] @ s
            grams[i] = m - carried - carried.T + s.T @ m[group][:, group] @ s
            costs[i] = _group_costs(view, inverses[i], grams[i])
    return order


def _group_costs(view: GroupView, inverse: Tensor, gram: Tensor) -> Tensor:
    """(c,): tr(M_GG H_GG⁻¹) of every channel of a view."""
    inputs = view.inputs.to(inverse.device)
    h = inverse[inputs[:, :, None], inputs[:, None, :]]
    m = gram[inputs[:, :, None], inputs[:, None, :]]
    if inputs.shape[1] == 1:
        return (m / h.clamp(min=1e-300))[:, 0, 0]
    return (m * torch.linalg.pinv(h, hermitian=True).transpose(1, 2)).sum((1, 2))


def _inverse(covariance: Tensor, ridge: float) -> Tensor:
    """(C + εI)⁻¹ of the positive part; the identity where there is none."""
    inverse = ridge_inverse(covariance, ridge)
    if inverse is not None and bool((inverse.diagonal() > 0).all()):
        return inverse
    return torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
