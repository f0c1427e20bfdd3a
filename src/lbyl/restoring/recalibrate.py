"""A second pass after pruning: move running statistics towards what the original's would be.

Corrections computed consumer by consumer do not know of errors that arrive from earlier layers.
Here the original and the slim network both run on the same inputs, BatchNorm normalising by the
batch, and each running mean and variance moves towards where the batch's went. Half way: on
procedural images a slim network errs more than on those it was made for, so that the whole way goes
too far.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Axis, Graph
from lbyl.graph.watch import NormCall, Watch
from lbyl.inputs.batches import InputBatches
from lbyl.restoring.correct import VARIANCE_LIMITS, scaled_variance
from lbyl.torchkit.fallbacks import at, note
from lbyl.torchkit.run import call_model, evaluation_mode
from lbyl.torchkit.tensors import is_finite, tensors

STEP = 0.5  # fraction of the way that running statistics move


class BatchMoments(Watch):
    """Sums what enters every BatchNorm, by the id of its running mean."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__(by_batch=by_batch)
        self.sums: dict[int, list[Tensor]] = {}

    def before_norm(self, call: NormCall) -> None:
        if call.mean is None or (self.by_batch and call.varies):
            return
        x = call.x
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(exact, dims, correction=0)
        self._add(call, mean, variance)

    def on_batch(self, call: NormCall, mean: Tensor, variance: Tensor) -> None:
        if call.mean is not None:
            self._add(call, mean, variance)

    def _add(self, call: NormCall, mean: Tensor, variance: Tensor) -> None:
        mean, variance, x = mean.double(), variance.double(), call.x
        count = float(x.numel() // x.shape[1])
        parts = [count * mean, count * (variance + mean.square())]
        parts.append(torch.tensor(count, device=x.device))
        old = self.sums.get(id(call.mean))
        self.sums[id(call.mean)] = [a + b for a, b in zip(old, parts)] if old else parts


BatchNormMoments = dict[str, tuple[Tensor, Tensor]]
"""Name of a running mean → mean and variance of what enters its BatchNorm."""


def batch_moments(model: nn.Module, inputs: InputBatches) -> BatchNormMoments:
    """Mean and variance at the input of every BatchNorm, by the name of its running mean."""
    watch = BatchMoments(inputs.batch_statistics)
    names = {id(t): n for n, t in tensors(model).items()}
    with evaluation_mode(model), torch.no_grad():
        for batch in inputs.batches:
            with watch:
                call_model(model, batch)
    moments = {}
    for key, (total, squares, count) in watch.sums.items():
        if key in names:
            mean = total / count
            moments[names[key]] = (mean, (squares / count - mean.square()).clamp(min=0))
    return moments


def recalibrate(
    original: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    inputs: InputBatches,
    step: float = STEP,
    limits: tuple[float, float] = VARIANCE_LIMITS,
    before: BatchNormMoments | None = None,
) -> int:
    """Move the running statistics of `slim` (in place) towards what the second pass shows.

    With batch means m, m' and variances v, v' of the original and of `slim`, the target of the mean
    is μ + m' − m and that of the variance (σ² + ε) v'/v − ε, v'/v within `limits`.
    `step` is the fraction of the way there: linear for the mean, geometric for the variance.

    `before` are the original's moments on the same inputs, where they are known already. Returns
    how many BatchNorms were moved.
    """
    before = batch_moments(original, inputs) if before is None else before
    after = batch_moments(slim, inputs)
    state, now, moved_norms = tensors(original), tensors(slim), 0
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
        held_mean, held_var = now[norm.mean].double(), now[norm.var].double()
        moved_mean = held_mean + step * (mean - held_mean)
        factor = (var / (held_var + norm.eps).clamp(min=1e-30)) ** step
        moved_var = scaled_variance(held_var, norm.eps, factor)
        if not is_finite(moved_mean.to(now[norm.mean]), moved_var.to(now[norm.var])):
            with at(norm.mean.rpartition(".")[0]):
                note("not recalibrated: what enters it is not finite")
            continue
        now[norm.mean].copy_(moved_mean)
        now[norm.var].copy_(moved_var)
        moved_norms += 1
    return moved_norms
