"""`fold`: channels that are alike become one, their average; consumers get their sum.

Clusters are sought among filters, normalisation and consumers together, and the method chooses them
itself. Averaging unlike filters loses variance, which a factor on the scale of the BatchNorm gives
back; the factor comes from the weights too.

What the design must satisfy: the clusters are a function of weights, number and seed alone, so
that choosing and delivering, which happen apart, see the same ones. All of k-means is done on the
Gram matrix of the features: they are long (thousands), channels are few.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.methods.base import Delivery, Method, registry
from lbyl.runtime.session import one_thread

if TYPE_CHECKING:
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Statistics


SAME = 1e-12  # of the mean square of a feature vector: distances below it are rounding
REMEMBERED = 512  # units whose clusters are kept, by what they were found in
_KNOWN: dict[bytes, tuple[Tensor, Tensor]] = {}
STEPS = 50  # of Lloyd's iteration; it mostly ends after ten


@registry.register("fold")
@dataclass(frozen=True)
class Fold(Method):
    """k-means on [normalised filter | BatchNorm | consumers], then average and sum.

    Under a plan made otherwise every pruned channel joins the kept one nearest to it in front of
    the consumers, since what is equal there can be summed whatever the consumers do.
    """

    restarts: int = 4
    seed: int = 0
    chooses: ClassVar[bool] = True
    restores_duplicates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 1:
            raise LbylError(f"fold's restarts are {self.restarts}: at least one is needed")

    def select(self, weights: UnitWeights, count: int) -> Tensor:
        """Of each cluster the channel nearest to its mean, ascending."""
        if count == weights.unit.channels:
            return torch.arange(count)
        return self._clusters(weights, count)[0]

    def _clusters(self, weights: UnitWeights, count: int) -> tuple[Tensor, Tensor]:
        """Representatives (count,) ascending, and for every channel the index of its own."""
        gram = _gram(torch.cat([*_made(weights), weights.consumer_weights], dim=1))
        # Choosing and delivering ask for the same clusters, one right after the other.
        key = f"{count} {self.restarts} {self.seed} {weights.unit.start}".encode()
        name = hashlib.sha256(key + gram.numpy().tobytes()).digest()
        if name not in _KNOWN:
            while len(_KNOWN) >= REMEMBERED:
                _KNOWN.pop(next(iter(_KNOWN)))
            _KNOWN[name] = self._cluster(gram, count, weights.unit.start)
        return _KNOWN[name]

    def _cluster(self, gram: Tensor, count: int, start: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + start)
        # Hundreds of steps, each too short for threads to be worth their meeting.
        with one_thread():
            label = k_means(gram, count, self.restarts, generator)
            own = _distances(gram, label, count).gather(1, label[:, None])[:, 0]
            far = torch.full((len(label), count), torch.inf, dtype=own.dtype)
            far[torch.arange(len(label)), label] = own
            kept, order = far.argmin(0).sort()
            return kept, torch.argsort(order)[label]

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        kept = kept.cpu()
        own, label = self._clusters(weights, len(kept))
        nearest, same = _nearest(weights, kept)
        # Channels that are the same in front of the consumers are summed exactly, wherever the
        # clusters, which also go by consumers, have put them.
        label = torch.where(same, nearest, label) if torch.equal(own, kept) else nearest
        members = F.one_hot(label, len(kept)).double().to(weights.device)  # (m, t)
        if not _can_merge(weights):
            return Delivery(members)
        merge = (members / members.sum(0)).T
        return Delivery(members, merge, _gain(weights.filters, members))


def _made(weights: UnitWeights) -> list[Tensor]:
    """What makes a channel: its filter over the deviation, its constant, γ and β."""
    norm = weights.norm
    if norm is None:
        return [weights.filters_with_bias]
    sigma = norm.sigma.clamp(min=1e-12)[:, None]
    return [weights.filters / sigma, norm.gamma[:, None], norm.beta[:, None]]


def _gram(features: Tensor) -> Tensor:
    """(m, m) on the CPU, centred: distances stay, rounding in a common part goes."""
    centred = features - features.mean(0)
    return (centred @ centred.T).cpu()


def _nearest(weights: UnitWeights, kept: Tensor) -> tuple[Tensor, Tensor]:
    """For every channel the kept one most like it in front of the consumers; are they the same?"""
    made = weights.folded.cpu()
    distance, label = torch.cdist(made, made[kept]).min(1)
    label[kept] = torch.arange(len(kept))
    return label, distance.square() <= SAME * made.square().sum(1).mean()


def _can_merge(weights: UnitWeights) -> bool:
    """Whether every channel has as many slices as any other wherever it is not read."""
    unit, consumed = weights.unit, {(c.weight, c.axis) for c in weights.consumers}
    for axis in weights.graph.axes_of[unit.name]:
        counts = unit.slice_counts(weights.graph.axes[axis])
        if axis not in consumed and bool((counts != counts[0]).any()):
            return False
    return True


def _gain(filters: Tensor, members: Tensor) -> Tensor:
    """(t,): N/√(N + (N² − N)·E[corr]), E[corr] the mean cosine between a cluster's filters."""
    unit = F.normalize(filters, dim=1, eps=1e-30)
    size = members.sum(0)
    pairs = (members.T @ unit).square().sum(1) - members.T @ unit.square().sum(1)
    alike = (pairs / (size.square() - size).clamp(min=1)).clamp(0, 1)
    return size / (size + (size.square() - size) * alike).sqrt()


def k_means(gram: Tensor, count: int, restarts: int, generator: torch.Generator) -> Tensor:
    """(m,): the cluster of every point, the best of several starts; none is empty."""
    best, least = None, torch.inf
    for start in _spread_starts(gram, count, restarts, generator):
        label = _lloyd(gram, start, count)
        cost = float(_distances(gram, label, count).gather(1, label[:, None]).sum())
        if best is None or cost < least * (1 - 1e-9):
            best, least = label, cost
    assert best is not None
    return best


def _spread_starts(
    gram: Tensor, count: int, starts: int, generator: torch.Generator
) -> list[Tensor]:
    """k-means++: each next centre is drawn by its squared distance to the nearest one so far.

    All starts at once, for the steps of one are many and small.
    """
    square, each = gram.diagonal(), torch.arange(starts)
    floor = SAME * float(square.mean().clamp(min=1e-300))
    distance = torch.full((starts, len(square)), torch.inf, dtype=gram.dtype)
    undrawn = torch.ones(starts, len(square), dtype=torch.bool)
    chance = undrawn.to(gram)
    centres_of = torch.empty(starts, count, dtype=torch.long)
    for step in range(count):
        none_left = chance.sum(1, keepdim=True) == 0  # fewer different points than centres
        chance = torch.where(none_left, undrawn.to(gram), chance)
        new = torch.multinomial(chance, 1, generator=generator)[:, 0]
        centres_of[:, step] = new
        undrawn[each, new] = False
        distance = torch.minimum(distance, square + square[new, None] - 2 * gram[new])
        chance = torch.where(undrawn & (distance > floor), distance, 0.0)
    return [_joined(gram, centres) for centres in centres_of]


def _joined(gram: Tensor, centres: Tensor) -> Tensor:
    """Every point to the nearest of some points."""
    label = (gram.diagonal()[centres] - 2 * gram[:, centres]).argmin(1)
    label[centres] = torch.arange(len(centres))
    return label


def _lloyd(gram: Tensor, label: Tensor, count: int) -> Tensor:
    for _ in range(STEPS):
        distance = _distances(gram, label, count)
        new = distance.argmin(1)
        # Of equals the old one: points that coincide must not wander for ever.
        new = torch.where(distance.gather(1, label[:, None])[:, 0] <= distance.amin(1), label, new)
        new = _filled(new, distance, count)
        if torch.equal(new, label):
            break
        label = new
    return label


def _filled(label: Tensor, distance: Tensor, count: int) -> Tensor:
    """Give every empty cluster the point farthest from its own centre."""
    size = torch.bincount(label, minlength=count)
    for empty in torch.nonzero(size == 0).reshape(-1).tolist():
        own = distance.gather(1, label[:, None])[:, 0]
        movable = torch.where(size[label] > 1, own, -torch.inf)
        point = int(movable.argmax())
        size[label[point]] -= 1
        label[point] = empty
        size[empty] = 1
    return label


def _distances(gram: Tensor, label: Tensor, count: int) -> Tensor:
    """(m, count): squared distances to the means of the clusters."""
    size = torch.bincount(label, minlength=count).clamp(min=1)
    cross = gram.new_zeros(len(label), count).index_add_(1, label, gram) / size
    within = gram.new_zeros(count).index_add_(0, label, cross.gather(1, label[:, None])[:, 0])
    return (gram.diagonal()[:, None] - 2 * cross + within / size).clamp(min=0)
