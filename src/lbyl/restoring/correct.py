"""Putting a consumer's output back to the mean and variance it had before pruning.

A step of its own, good for every method. The mean goes into the running mean of the BatchNorm
behind the consumer, or into the consumer's bias; the variance into the running variance, or into
the weight of a convolution that has no BatchNorm behind it, as those that were folded have.
`recalibrate` does the same and is followed by a second run of both networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lbyl.graph.unit import Consumer, Graph, Norm
from lbyl.runtime.assumptions import holds
from lbyl.statistics.moments import Moments

VARIANCE_LIMITS = (0.05, 4.0)  # a correction beyond these is an artefact of the images
WORSE, ROUNDING = 1.01, 1e-9  # factor and sum by which an error must exceed another


@dataclass(frozen=True)
class Shift:
    """How a consumer's output moved when its weight was rewritten."""

    mean: Tensor  # (…, outputs): by how much
    variance: Tensor  # (…, outputs): by what factor
    error: Tensor  # variance of the difference over that of the output, all outputs together
    total: Tensor  # variance of the output before, all outputs together
    now: Tensor | float = 0.0  # (…, outputs): the mean that it has


@dataclass(frozen=True)
class Before:
    """A consumer's output before anything was pruned: the same for every plan."""

    mean: Tensor  # (…, outputs)
    variance: Tensor  # (…, outputs)
    varies: Tensor  # (…, outputs): whether it does
    total: Tensor  # variance of all outputs together

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor) -> Before:
        varies = variance > 1e-12 * variance.max().clamp(min=1e-300)
        return cls(mean, variance, varies, variance.sum().clamp(min=1e-300))

    @classmethod
    def of_several(cls, each: Sequence[Before]) -> Before:
        """Of several consumers, side by side."""
        names = ("mean", "variance", "varies", "total")
        return cls(*(torch.stack([getattr(one, name) for one in each]) for name in names))

    def shift(self, mean: Tensor, variance: Tensor, difference: Tensor) -> Shift:
        """How it moved: by its mean and variance now, and the variance of the difference."""
        ratio = variance / self.variance.clamp(min=1e-300)
        ratio = torch.where(self.varies & ratio.isfinite(), ratio, 1.0)
        error = difference.clamp(min=0).sum(-1) / self.total
        return Shift(mean - self.mean, ratio.clamp(*VARIANCE_LIMITS), error, self.total, mean)


def output_before(moments: Moments, old: Tensor, mixed: Tensor) -> Before:
    """The output under the old weight, which times the covariance is `mixed`, both arranged."""
    return Before.of(moments.output_mean(old), (mixed * old.flatten(1)).sum(1))


def known_shift(
    before: Before, weight: Tensor, mean: Tensor, mixed: Tensor, across: Tensor
) -> Shift:
    """How the output moves under a weight whose products are known already.

    All are at the kept rows: `weight` (…, outputs, rows), the `mean` of the inputs (…, rows), and
    the covariance times `weight`, `mixed`, and times the old weight, `across`.
    """
    now, both = (mixed * weight).sum(-1), (across * weight).sum(-1)
    means = (weight @ mean[..., None])[..., 0]
    return before.shift(means, now, before.variance + now - 2 * both)


def output_shift(
    moments: Moments, old: Tensor, new: Tensor, kept: Tensor, mixed: Tensor | None = None
) -> Shift:
    """Compare the output under the old weight and under the new one (both unarranged).

    `mixed` is the old one, arranged, times the covariance, where that is known.
    """
    before, after = moments.arrange(old), _arranged(moments, new, kept)
    features = moments.kept_features(kept)
    was, now, difference = moments.output_change(before, after, features, mixed)
    was_before = Before.of(moments.output_mean(before), was)
    return was_before.shift(moments.output_mean(after, features), now, difference)


def is_worse_than_cut(moments: Moments, old: Tensor, kept: Tensor, shift: Shift) -> bool:
    """Whether the output errs more under the new weight than with nothing but pruned inputs cut.

    In that case it errs by what they carried. What was solved on these moments does so only where
    numbers ran out of digits.
    """
    pruned = ~moments.kept_features(kept).cpu()
    carried = moments.output_variance(moments.arrange(old)[:, pruned.to(old.device)], pruned)
    missed = carried.clamp(min=0).sum() / shift.total
    return not holds(~missed.isfinite() | (shift.error <= WORSE * missed + ROUNDING))


def _arranged(moments: Moments, weight: Tensor, kept: Tensor) -> Tensor:
    if moments.columns is None:
        return weight
    full = weight.new_zeros(weight.shape[0], len(kept), weight.shape[2])
    full[:, kept.to(weight.device)] = weight
    return moments.arrange(full)[:, moments.kept_features(kept).to(weight.device)]


def scaled_variance(variance: Tensor, eps: float | Tensor, factor: Tensor) -> Tensor:
    """A running variance under which BatchNorm divides by a variance `factor` times as large.

    BatchNorm divides by the root of variance + eps, so that sum is what scales.
    """
    return ((variance + eps) * factor - eps).clamp(min=0)


def is_rescaled(consumer: Consumer, graph: Graph, correction: str) -> bool:
    """Whether the variance of a consumer's output goes into its weight.

    So it does behind convolutions that BatchNorm was folded into. Where something normalises, and
    behind linear layers, the least error counts: the layers of a transformer lose by it.
    """
    folded = graph.forgot and consumer.norm is None and consumer.kind != "linear"
    return folded and puts_variance_back(correction)


def puts_variance_back(correction: str) -> bool:
    return correction not in ("none", "mean")


def rescaled(weight: Tensor, shift: Shift) -> tuple[Tensor, Shift]:
    """A weight (…, outputs, …) under which outputs have their variance again, and their shift."""
    factor = shift.variance.rsqrt()
    shape = [*factor.shape, *[1] * (weight.dim() - factor.dim())]
    moved = shift.mean + (factor - 1) * shift.now
    return weight * factor.reshape(shape).to(weight), replace(shift, mean=moved)


def corrected_values(
    consumer: Consumer,
    shift: Shift,
    state: Mapping[str, Tensor],
    correction: str,
    bias_allowed: bool,
) -> dict[str, Tensor]:
    """New values of the consumer's BatchNorm or bias, in full output size."""
    norm = consumer.norm
    if correction == "none":
        return {}
    if norm is not None:
        names = moved_by(norm, correction)
        held = [state[name].detach() for name in names]
        return dict(zip(names, corrected_norm(held, norm.eps, shift)))
    if consumer.bias is not None:
        bias = state[consumer.bias].detach().double()
        return {consumer.bias: bias - shift.mean.to(bias)}
    return {f"{consumer.name}.bias": -shift.mean} if bias_allowed else {}


def moved_by(norm: Norm, correction: str) -> list[str]:
    """The running statistics that a correction moves."""
    return [norm.mean, norm.var] if puts_variance_back(correction) else [norm.mean]


def corrected_norm(held: Sequence[Tensor], eps: float | Tensor, shift: Shift) -> list[Tensor]:
    """A running mean, and variance where it is given, after what is in front has moved."""
    mean = held[0].double()
    values = [mean + shift.mean.to(mean)]
    for variance in held[1:]:
        var = variance.double()
        values.append(scaled_variance(var, eps, shift.variance.to(var)))
    return values


def as_held(values: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New values as the model will hold them, so that a large one is not kept in float64."""
    return {n: v.to(state[n].dtype) if n in state else v for n, v in values.items()}
