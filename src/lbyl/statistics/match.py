"""Moments at a consumer's input, matched to the running statistics of the BatchNorm behind it.

On procedural images a consumer's output has not quite the mean and variance that the training
data gave it; the BatchNorm behind it has both as running statistics. So the inputs' moments are
moved, no further than that takes: the distribution given the output is unchanged, and the output
gets the running mean and variances with the least change of its distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Consumer, Graph
from lbyl.graph.weights import as_matrix
from lbyl.runtime.memory import alike_in_chunks
from lbyl.runtime.notes import at, note
from lbyl.runtime.processes import from_owner, several, share
from lbyl.runtime.tensors import tensors
from lbyl.statistics.moments import Moments, Statistics
from lbyl.statistics.solve import add_symmetric, by_factor, gram, mirror

DAMPING = 0.01  # of the mean output variance: outputs may outnumber inputs, or repeat each other
LIMITS = (0.25, 4.0)  # a correction of a variance beyond these is not trusted
SMOOTHING = 0.01  # of the Newton step, against outputs that contradict each other
STEPS = 2
WIDER = 4  # features for every output from which products with the weight are small enough to keep
HALVINGS = 4


@dataclass(frozen=True)
class Known:
    """A consumer's moments, its weight, and what the BatchNorm behind it remembers."""

    moments: Moments
    weight: Tensor  # (outputs, features · taps)
    mean: Tensor  # (outputs,): of its output, less its bias
    variance: Tensor  # (outputs,)


def match_running_stats(model: nn.Module, graph: Graph, statistics: Statistics) -> Statistics:
    """The same statistics with every consumer's moments agreeing with the BatchNorm behind it.

    New covariances take the place of those given, in memory: nobody needs both.
    """
    state = tensors(model)
    moments = dict(statistics.moments)
    mine = [name for _, name in share(list(moments))]
    for names in _groups(mine, graph, moments, state):
        moments |= _matched_at({n: (graph.consumers[n], moments[n]) for n in names}, state)
    if several():
        for number, (name, own) in enumerate(moments.items()):
            mean, covariance = (from_owner(x.clone(), number) for x in (own.mean, own.covariance))
            moments[name] = dataclasses.replace(own, mean=mean, covariance=covariance)
    return dataclasses.replace(statistics, moments=moments)


def _matched_at(
    several: Mapping[str, tuple[Consumer, Moments]], state: Mapping[str, Tensor]
) -> dict[str, Moments]:
    """New moments of consumers of one shape that could be matched."""
    asked = {name: _known(*one, state) for name, one in several.items()}
    known = {name: one for name, one in asked.items() if one is not None}
    made: dict[str, Moments] = {}
    for name, new in zip(known, matched_alike(list(known.values()))):
        if new is None:
            with at(name):
                note("moments are left as measured: running statistics could not be matched")
        else:
            made[name] = new
    return made


def _groups(
    names: Sequence[str], graph: Graph, moments: Mapping[str, Moments], state: Mapping[str, Tensor]
) -> Iterator[list[str]]:
    """Consumers of one shape, which a device matches in one go; a processor has one at a time."""
    weights = [state[graph.consumers[name].weight] for name in names]
    kinds = [(w.shape, w.device) if w.is_cuda else name for name, w in zip(names, weights)]
    sizes = [len(moments[name].covariance) for name in names]
    for some in alike_in_chunks(kinds, sizes, weights[0].device) if names else ():
        yield [names[i] for i in some]


def _known(consumer: Consumer, moments: Moments, state: Mapping[str, Tensor]) -> Known | None:
    """None where nothing behind the consumer, or not all of its moments, tell its output's."""
    norm = consumer.norm
    if norm is None or moments.columns is not None:
        return None
    weight = as_matrix(state[consumer.weight], consumer)
    # The output's variance follows from the inputs' covariance only where every tap is in it.
    if moments.mean.shape != weight.shape[1:]:
        return None
    mean = state[norm.mean].detach().double()
    if consumer.bias is not None:
        mean = mean - state[consumer.bias].detach().double()
    return Known(moments, weight.flatten(1), mean, state[norm.var].detach().double())


def matched_alike(several: Sequence[Known]) -> list[Moments | None]:
    """Moments under which each weight gives its mean and about its variance; None where none do.

    The weights are of one shape. Jeffrey's rule for Gaussians: x given y = W x stays as it is while
    y's moments are replaced. New covariances are written where those given are held.
    """
    if not several:
        return []
    weight = _side_by_side([one.weight for one in several])
    old = _side_by_side([one.moments.covariance.to(weight) for one in several])
    centre = _side_by_side([one.moments.mean.flatten().to(weight) for one in several])
    across = old @ weight.mT  # (…, features, outputs)
    output_variance = (weight * across.mT).sum(-1)
    average = output_variance.mean(-1, keepdim=True)
    # A dead output has no variance: nothing is asked of it.
    known = output_variance > 1e-6 * average
    by_outputs = weight.shape[-2] <= weight.shape[-1]
    whole = average[..., 0] > 0 if by_outputs else known.all(-1)
    if len(several) > 1 and not bool(whole.all()):  # not all of one shape any more
        flags = whole.tolist()
        rest = iter(matched_alike([one for one, good in zip(several, flags) if good]))
        return [
            next(rest) if good else matched_alike([one])[0] for one, good in zip(several, flags)
        ]
    if len(several) == 1 and not bool(average > 0):  # nothing reaches the outputs
        return [several[0].moments]
    variance = _side_by_side([one.variance for one in several])
    ratio = torch.where(known, variance / output_variance.clamp(min=1e-300), 1.0).clamp(*LIMITS)
    target = output_variance * ratio
    gap = _side_by_side([one.mean for one in several]) - (weight @ centre[..., None])[..., 0]
    noise = DAMPING * average[..., 0]
    # The same in terms of outputs or of inputs, whichever are fewer.
    if by_outputs:
        found = _by_outputs(old, weight, across, target, gap, noise)
    else:
        found = _by_inputs(old, weight, target, gap, noise, known if len(several) == 1 else None)
    new = zip((centre + found.shift).unbind(), found.covariance.unbind(), found.good.tolist())
    mixed = [None] * len(several) if found.mixed is None else found.mixed.unbind()
    return [
        _with(one.moments, mean, changed, own) if is_good else None
        for one, (mean, changed, is_good), own in zip(several, new, mixed)
    ]


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Stacked; a single one is not copied."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def _with(moments: Moments, mean: Tensor, covariance: Tensor, mixed: Tensor | None) -> Moments:
    held = moments.covariance
    if held.data_ptr() != covariance.data_ptr():
        held.copy_(covariance)
    return dataclasses.replace(moments, mean=mean.reshape(moments.mean.shape), mixed=mixed)


class Matched(NamedTuple):
    """New covariances, and what else came out."""

    covariance: Tensor  # (…, features, features)
    shift: Tensor  # (…, features): what means move by
    good: Tensor  # (…,): whether both could be worked out
    mixed: Tensor | None = None  # (…, outputs, features): the weight times the new covariance


def _by_outputs(
    old: Tensor, weight: Tensor, across: Tensor, target: Tensor, gap: Tensor, noise: Tensor
) -> Matched:
    """Through the regression of inputs on outputs; what cannot be worked out stays as it is.

    The new covariances are written over the old ones.
    """
    output_covariance = weight @ across
    output_covariance.diagonal(dim1=-2, dim2=-1).add_(noise[..., None])
    root, failed = torch.linalg.cholesky_ex(output_covariance)
    regression = by_factor(root, across.mT).mT
    change = with_diagonal(root, root, target + noise[..., None]) - output_covariance
    shift = (regression @ gap[..., None])[..., 0]
    # No number that is added to a covariance is larger than this.
    largest = regression.square().sum((-2, -1)) * change.square().sum((-2, -1)).sqrt()
    good = (failed == 0) & (largest + shift.sum(-1)).isfinite()
    for x in (regression, change):
        x.masked_fill_(~good[..., None, None], 0.0)
    mirror(add_symmetric(old, regression, regression.mT, between=change))
    mixed = None
    if WIDER * weight.shape[-2] <= weight.shape[-1]:
        # W R is I − noise Σ⁻¹, Σ being the outputs' covariance with the noise.
        seen = change - noise[..., None, None] * by_factor(root, change)
        mixed = across.mT.baddbmm_(seen, regression.mT)
    return Matched(old, shift, good, mixed)


def _by_inputs(
    old: Tensor,
    weight: Tensor,
    target: Tensor,
    gap: Tensor,
    noise: Tensor,
    known: Tensor | None = None,
) -> Matched:
    """The same where outputs outnumber inputs; `known` (…, outputs) are those that vary at all.

    Where some do not there can be one consumer only.
    """
    eye = torch.eye(old.shape[-1], dtype=old.dtype, device=old.device)
    small = 1e-6 * old.diagonal(dim1=-2, dim2=-1).mean(-1)
    inner, failed = torch.linalg.cholesky_ex(old + small[..., None, None] * eye)
    root = weight @ inner
    scaled = root.mT / noise[..., None, None]
    outer, failed_too = torch.linalg.cholesky_ex(eye + scaled @ root)
    shift = (inner @ by_factor(outer, scaled @ gap[..., None]))[..., 0]
    if known is not None and not bool(known.all()):
        root, target = root[known][None], target[known][None]
    covariance = with_diagonal(inner, root, target)
    finite = (covariance.sum((-2, -1)) + shift.sum(-1)).isfinite()
    return Matched(covariance, shift, finite & (failed == 0) & (failed_too == 0))


def with_diagonal(inner: Tensor, root: Tensor, diagonal: Tensor) -> Tensor:
    """`inner innerᵀ` changed least, by Kullback and Leibler, so that `root rootᵀ` has a diagonal.

    The answer is inner (I + rootᵀ Λ root)⁻¹ innerᵀ with a diagonal Λ that a few Newton steps find.
    Where the targets contradict each other the smoothed steps serve all outputs on average; each is
    taken only as far as the diagonal comes nearer. All may be of several problems at once.
    """
    scale = root.square().sum(-1).rsqrt()
    unit, target = root * scale[..., None], diagonal * scale.square()
    eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    smooth = SMOOTHING * torch.eye(root.shape[-2], dtype=root.dtype, device=root.device)
    shift, factor, half = torch.zeros_like(scale), eye, unit.mT
    now = half.square().sum(-2)
    misfit = _misfit(now, target)
    going = torch.ones_like(misfit, dtype=torch.bool)
    for _ in range(STEPS):
        # Newton on the reciprocals, in which one output alone is solved by a single step.
        gap = (now * (now - target) / target)[..., None]
        curvature, failed = torch.linalg.cholesky_ex((half.mT @ half).square() + smooth)
        going = going & (failed == 0)
        step = by_factor(curvature, gap)[..., 0]
        nearer = torch.zeros_like(going)
        for _ in range(HALVINGS):
            changed = eye + unit.mT @ ((shift + step)[..., None] * unit)
            tried, failed = torch.linalg.cholesky_ex(changed)
            new_half = torch.linalg.solve_triangular(tried, unit.mT, upper=False)
            new_now = new_half.square().sum(-2)
            new_misfit = _misfit(new_now, target)
            nearer = nearer | (going & (failed == 0) & (new_misfit < misfit))
            if bool((nearer | ~going).all()):
                break
            step = torch.where(nearer[..., None], step, step / 2)
        # Where no step of a sensible length helps the outputs contradict each other.
        going = nearer
        state = going.tolist() if going.dim() else [bool(going)]
        if not any(state):
            break
        new = (shift + step, tried, new_half, new_now, new_misfit)
        if not all(state):
            was = (shift, factor, half, now, misfit)
            new = tuple(_where(going, x, y) for x, y in zip(new, was))  # type: ignore[assignment]
        shift, factor, half, now, misfit = new
    return gram(torch.linalg.solve_triangular(factor, inner.mT, upper=False))


def _where(flags: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """One where flags (…,) are set, else the other."""
    return torch.where(flags.reshape(*flags.shape, *[1] * (one.dim() - flags.dim())), one, other)


def _misfit(variance: Tensor, target: Tensor) -> Tensor:
    """(…,)"""
    return (variance / target).log().square().sum(-1)
