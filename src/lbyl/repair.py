"""Putting a consumer's output back to the mean and variance it had before pruning.

A step of its own, good for every method. The mean goes into the running mean of the BatchNorm
behind the consumer, or into the consumer's bias; the variance into the running variance. "network"
does the same and then lets both networks run once more (`lbyl.statistics.recalibrate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lbyl.exceptions import LbylError
from lbyl.statistics.base import Moments
from lbyl.unit import Consumer

REPAIRS = ("network", "mean+variance", "mean", "none")
VARIANCE_LIMITS = (0.05, 4.0)  # a repair beyond these is an artefact of the images


@dataclass(frozen=True)
class Shift:
    """How a consumer's output moved: its mean by `mean`, its variance by the factor `variance`."""

    mean: Tensor
    variance: Tensor


def check_repair(repair: str) -> None:
    if repair not in REPAIRS:
        raise LbylError(f"unknown repair {repair!r}; the known ones are {', '.join(REPAIRS)}")


def output_shift(moments: Moments, old: Tensor, new: Tensor, alive: Tensor) -> Shift:
    """Compare the output under the old weight and under the new one (both unarranged)."""
    before, after = moments.arrange(old), _arranged(moments, new, alive)
    stays = moments.features_alive(alive)
    mean = moments.output_mean(after, stays) - moments.output_mean(before)
    was = moments.output_variance(before)
    now = moments.output_variance(after, stays)
    known = was > 1e-12 * was.max().clamp(min=1e-300)
    ratio = torch.where(known, now / was.clamp(min=1e-300), torch.ones_like(was))
    return Shift(mean, ratio.clamp(*VARIANCE_LIMITS))


def _arranged(moments: Moments, weight: Tensor, alive: Tensor) -> Tensor:
    if moments.columns is None:
        return weight
    full = weight.new_zeros(weight.shape[0], len(alive), weight.shape[2])
    full[:, alive.to(weight.device)] = weight
    return moments.arrange(full)[:, moments.features_alive(alive).to(weight.device)]


def repaired(
    consumer: Consumer, shift: Shift, state: Mapping[str, Tensor], repair: str, bias_allowed: bool
) -> dict[str, Tensor]:
    """New values of the consumer's BatchNorm or bias, in full output size."""
    norm = consumer.norm
    if repair == "none":
        return {}
    if norm is not None:
        mean = state[norm.mean].detach().double()
        values = {norm.mean: mean + shift.mean.to(mean)}
        if repair in ("network", "mean+variance"):
            var = state[norm.var].detach().double()
            # BatchNorm divides by var + eps, so that sum is what must scale.
            values[norm.var] = ((var + norm.eps) * shift.variance.to(var) - norm.eps).clamp(min=0)
        return values
    if consumer.bias is not None:
        bias = state[consumer.bias].detach().double()
        return {consumer.bias: bias - shift.mean.to(bias)}
    return {f"{consumer.name}.bias": -shift.mean} if bias_allowed else {}
