"""A second pass after pruning: bring every BatchNorm nearer to what it saw in the original.

Repairs computed consumer by consumer do not know of errors that arrive from earlier layers. Here
the original and the slim network both run on the same inputs, with BatchNorm going by the batch,
and each running mean and variance moves towards where the batch's went. Half way: on procedural
images a slim network errs more than on those it was made for, so that the whole way goes too far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.channels import Axis
from lbyl.listen import Function, NormListener
from lbyl.record import call_model, evaluation_mode
from lbyl.repair import VARIANCE_LIMITS
from lbyl.statistics.gather import Passes
from lbyl.surgery import tensors
from lbyl.unit import Graph

SHARE = 0.5  # of the way


class BatchMoments(NormListener):
    """Sums what enters every BatchNorm, by the id of its running mean."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__(by_batch)
        self.sums: dict[int, list[Tensor]] = {}

    def hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        x, mean = args[0], args[1]
        if mean is not None:
            dims, count = [d for d in range(x.dim()) if d != 1], float(x.numel() // x.shape[1])
            exact = x.to(torch.promote_types(x.dtype, torch.float32))
            spread, middle = (v.double() for v in torch.var_mean(exact, dims, correction=0))
            parts = [count * middle, count * (spread + middle.square())]
            parts.append(torch.tensor(count, device=x.device))
            old = self.sums.get(id(mean))
            self.sums[id(mean)] = [a + b for a, b in zip(old, parts)] if old else parts
        return self.normalise(args, kwargs)


def batch_moments(model: nn.Module, passes: Passes) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance at the input of every BatchNorm, by the name of its running mean."""
    listener = BatchMoments(passes.batch_statistics)
    names = {id(t): n for n, t in tensors(model).items()}
    with evaluation_mode(model), torch.no_grad():
        for batch in passes.batches:
            with listener:
                call_model(model, batch)
    found = {}
    for key, (total, squares, count) in listener.sums.items():
        if key in names:
            mean = total / count
            found[names[key]] = (mean, (squares / count - mean.square()).clamp(min=0))
    return found


def recalibrate(
    original: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    passes: Passes,
    share: float = SHARE,
    limits: tuple[float, float] = VARIANCE_LIMITS,
) -> None:
    """Move the running statistics of `slim` (in place) towards what the second pass shows."""
    before, after = batch_moments(original, passes), batch_moments(slim, passes)
    state, now = tensors(original), tensors(slim)
    for norm in graph.norms:
        if norm.mean not in before or norm.mean not in after:
            continue
        keep = indices.get((norm.mean, 0))
        mean, var = state[norm.mean].double(), state[norm.var].double() + norm.eps
        old_mean, old_var = before[norm.mean]
        if keep is not None:
            keep = keep.to(mean.device)
            mean, var, old_mean, old_var = mean[keep], var[keep], old_mean[keep], old_var[keep]
        new_mean, new_var = after[norm.mean]
        ratio = ((new_var + 1e-12) / (old_var + 1e-12)).clamp(*limits)
        mean, var = mean + new_mean - old_mean, var * ratio
        held_mean, held_var = now[norm.mean].double(), now[norm.var].double() + norm.eps
        now[norm.mean].copy_(held_mean + share * (mean - held_mean))
        moved = held_var * (var / held_var.clamp(min=1e-30)) ** share
        now[norm.var].copy_((moved - norm.eps).clamp(min=0))
