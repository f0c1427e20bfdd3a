"""Putting a consumer's output back to the mean and variance it had before pruning.

A step of its own, good for every method. The mean goes into the running mean of the BatchNorm
behind the consumer, or into the consumer's bias; the variance into the running variance.
`recalibrate` does the same and is followed by a second run of both networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lbyl.graph.unit import Consumer
from lbyl.statistics.moments import Moments
from lbyl.torchkit.assumptions import holds

VARIANCE_LIMITS = (0.05, 4.0)  # a correction beyond these is an artefact of the images
WORSE, ROUNDING = 1.01, 1e-9  # factor and sum by which an error must exceed another


@dataclass(frozen=True)
class Shift:
    """How a consumer's output moved when its weight was rewritten."""

    mean: Tensor  # (outputs,): by how much
    variance: Tensor  # (outputs,): by what factor
    error: Tensor  # variance of the difference over that of the output, all outputs together
    total: Tensor  # variance of the output before, all outputs together


def output_shift(
    moments: Moments,
    old: Tensor,
    new: Tensor,
    kept: Tensor,
    mixed: Tensor | None = None,
    mixed_new: Tensor | None = None,
) -> Shift:
    """Compare the output under the old weight and under the new one (both unarranged).

    `mixed` and `mixed_new` are both, arranged, times the covariance, where that is known.
    """
    before, after = moments.arrange(old), _arranged(moments, new, kept)
    features = moments.kept_features(kept)
    mean = moments.output_mean(after, features) - moments.output_mean(before)
    was, now, difference = moments.output_change(before, after, features, mixed, mixed_new)
    known = was > 1e-12 * was.max().clamp(min=1e-300)
    ratio = torch.where(known, now / was.clamp(min=1e-300), torch.ones_like(was))
    ratio = torch.where(ratio.isfinite(), ratio, torch.ones_like(ratio))
    total = was.sum().clamp(min=1e-300)
    error = difference.clamp(min=0).sum() / total
    return Shift(mean, ratio.clamp(*VARIANCE_LIMITS), error, total)


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
        mean = state[norm.mean].detach().double()
        values = {norm.mean: mean + shift.mean.to(mean)}
        if correction != "mean":
            var = state[norm.var].detach().double()
            values[norm.var] = scaled_variance(var, norm.eps, shift.variance.to(var))
        return values
    if consumer.bias is not None:
        bias = state[consumer.bias].detach().double()
        return {consumer.bias: bias - shift.mean.to(bias)}
    return {f"{consumer.name}.bias": -shift.mean} if bias_allowed else {}
