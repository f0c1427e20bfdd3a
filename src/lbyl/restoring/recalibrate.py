"""A second pass after pruning: move running statistics towards what the original's would be.

Corrections computed consumer by consumer do not know of errors that arrive from earlier layers.
Here the original and the slim network both run on the same inputs, BatchNorm normalising by the
batch, and each running mean and variance moves towards where the batch's went. Half way: on
procedural images a slim network errs more than on those it was made for, so that the whole way goes
too far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Axis, Graph, Norm
from lbyl.graph.watch import NormCall, Watch
from lbyl.inputs.batches import InputBatches
from lbyl.restoring.correct import VARIANCE_LIMITS, scaled_variance
from lbyl.runtime.answers import as_scores, floating_in, half_sure, is_answer, joined_scores, kl
from lbyl.runtime.notes import at, note
from lbyl.runtime.run import call_model, evaluation_mode
from lbyl.runtime.tensors import copy_all, is_finite, names_of, onto, tensors

STEP = 0.5  # fraction of the way that running statistics move


class BatchMoments(Watch):
    """Sums what enters every BatchNorm, by the id of its running mean."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__(by_batch=by_batch)
        self.seen: dict[int, list[tuple[Tensor, Tensor, int]]] = {}  # mean, variance, how many

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
        count = call.x.numel() // call.x.shape[1]
        self.seen.setdefault(id(call.mean), []).append((mean, variance, count))

    def moments(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Mean and variance over all batches."""
        return {key: _over_all(calls) for key, calls in self.seen.items()}


def _over_all(calls: Sequence[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Mean and variance of all that several calls saw, each with its own and how many it saw."""
    if len(calls) == 1:
        return calls[0][0].double(), calls[0][1].double()
    total, squares, count = torch.zeros(()), torch.zeros(()), 0
    for mean, variance, number in calls:
        mean = mean.double()
        total = total + number * mean
        squares = squares + number * (variance.double() + mean.square())
        count += number
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=0)


BatchNormMoments = dict[str, tuple[Tensor, Tensor]]
"""Name of a running mean → mean and variance of what enters its BatchNorm."""


@dataclass(frozen=True)
class Seen:
    """What a network shows on the inputs of the second pass."""

    moments: BatchNormMoments
    scores: Tensor | None  # (n, classes), where it answers with one vector an example

    @cached_property
    def temperature(self) -> float:
        """At which the network is half sure."""
        assert self.scores is not None
        return half_sure(self.scores)


@dataclass
class SecondPass:
    """Inputs that networks run on once more, and what the original shows on them.

    With BatchNorm normalising by the batch nobody reads running statistics, so that what a network
    shows holds after they were moved as well.
    """

    model: nn.Module = field(repr=False)
    inputs: InputBatches

    @cached_property
    def original(self) -> Seen:
        return self.run(self.model)

    def run(self, model: nn.Module) -> Seen:
        """What a network shows: what enters its BatchNorms, and how it answers."""
        watch = BatchMoments(self.inputs.batch_statistics)
        names = names_of(tensors(model))
        made: list[list[Tensor]] | None = []
        with evaluation_mode(model), torch.no_grad():
            for batch in self.inputs.batches:
                with watch:
                    out = call_model(model, batch)
                made = _with_answer(made, out)
        moments = {names[key]: pair for key, pair in watch.moments().items() if key in names}
        return Seen(moments, None if made is None else joined_scores(made))


def divergence_of(original: Seen, slim: Seen) -> float | None:
    """Of what two networks answered in the second pass; None where they gave no such answers."""
    if original.scores is None or slim.scores is None:
        return None
    if original.scores.shape != slim.scores.shape:
        return None
    found = float(kl(original.scores, slim.scores, original.temperature).mean())
    return found if math.isfinite(found) else math.inf


def _with_answer(made: list[list[Tensor]] | None, out: object) -> list[list[Tensor]] | None:
    """Answers with those of one more batch; None from the first that is none: it may be large."""
    if made is None:
        return None
    found = floating_in(out)
    return [*made, [as_scores(found[0].double())]] if is_answer(found) else None


def batch_moments(model: nn.Module, inputs: InputBatches) -> BatchNormMoments:
    """Mean and variance at the input of every BatchNorm, by the name of its running mean."""
    return SecondPass(model, inputs).original.moments


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
    """Run both networks on the inputs and move the running statistics of `slim`, in place.

    `before` are the original's moments on these inputs, where they are known already. Returns how
    many BatchNorms were moved.
    """
    before = batch_moments(original, inputs) if before is None else before
    after = batch_moments(slim, inputs)
    return move_running_stats(original, slim, graph, indices, before, after, step, limits)


def move_running_stats(
    original: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    before: BatchNormMoments,
    after: BatchNormMoments,
    step: float = STEP,
    limits: tuple[float, float] = VARIANCE_LIMITS,
) -> int:
    """Move the running statistics of `slim` (in place) towards what both networks showed.

    With batch means m, m' and variances v, v' of the original and of `slim`, the target of the mean
    is μ + m' − m and that of the variance (σ² + ε) v'/v − ε, v'/v within `limits`.
    `step` is the fraction of the way there: linear for the mean, geometric for the variance.
    `after` may be of the whole network, where nobody reads what `slim` lacks. Returns how many
    BatchNorms were moved.
    """
    state, now = tensors(original), tensors(slim)
    norms = [norm for norm in graph.norms if norm.mean in before and norm.mean in after]
    if not norms:
        return 0
    # All of them side by side: single vectors are short, and there are hundreds.
    lengths = [len(now[norm.mean]) for norm in norms]
    device = now[norms[0].mean].device
    keep = _kept_of_all(
        [indices.get((n.mean, 0)) for n in norms], [len(before[n.mean][0]) for n in norms]
    )
    keep = onto(keep, device)

    def joined(values: Iterable[Tensor]) -> Tensor:
        every = torch.cat([value.to(device) for value in values]).double()
        return every if len(every) == len(keep) else every[keep]

    eps = torch.tensor([norm.eps for norm in norms], dtype=torch.float64)
    eps = onto(eps.repeat_interleave(torch.tensor(lengths)), device)
    mean = joined(state[n.mean] for n in norms)
    var = joined(state[n.var] for n in norms) + eps
    old_mean, old_var = (joined(before[n.mean][i] for n in norms) for i in (0, 1))
    new_mean, new_var = (joined(after[n.mean][i] for n in norms) for i in (0, 1))
    ratio = ((new_var + 1e-12) / (old_var + 1e-12)).clamp(*limits)
    mean, var = mean + new_mean - old_mean, var * ratio
    held_mean, held_var = joined(now[n.mean] for n in norms), joined(now[n.var] for n in norms)
    factor = (var / (held_var + eps).clamp(min=1e-30)) ** step
    moved = held_mean + step * (mean - held_mean), scaled_variance(held_var, eps, factor)
    held_as = now[norms[0].mean].dtype
    alike = all(now[n].dtype == held_as for norm in norms for n in (norm.mean, norm.var))
    if alike:
        moved = moved[0].to(held_as), moved[1].to(held_as)
    pairs = zip(*(values.split(lengths) for values in moved))
    values = {n: (m.to(now[n.mean]), v.to(now[n.var])) for n, (m, v) in zip(norms, pairs)}
    if not (alike and is_finite(*moved)):
        values = {n: pair for n, pair in values.items() if _checked(n, pair)}
    held = [now[name] for norm in values for name in (norm.mean, norm.var)]
    copy_all(held, [x for pair in values.values() for x in pair])
    return len(values)


def _checked(norm: Norm, values: tuple[Tensor, Tensor]) -> bool:
    if not is_finite(*values):
        with at(norm.mean.rpartition(".")[0]):
            note("not recalibrated: what enters it is not finite")
        return False
    return True


def _kept_of_all(kept: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor:
    """Indices that are kept of several vectors (None: all), where these lie side by side."""
    parts, first = [], 0
    for indices, length in zip(kept, lengths):
        parts.append(first + (torch.arange(length) if indices is None else indices.cpu()))
        first += length
    return torch.cat(parts)
