"""Consumers of one shape, solved in one go.

A solution takes a hundred calls, each of which does little: one after the other they keep the
processor busy and a device waiting. Side by side they are as many for all as for one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lbyl.graph.unit import Consumer
from lbyl.graph.weights import from_matrix
from lbyl.methods.base import Method
from lbyl.restoring.correct import (
    Before,
    Shift,
    as_held,
    corrected_norm,
    corrected_values,
    known_shift,
    moved_by,
    rescaled,
)
from lbyl.runtime.tensors import onto
from lbyl.statistics.moments import Moments
from lbyl.statistics.solve import Regressed, Regression

ABSURD = 1e12  # times the largest weight there was: no channel is so much smaller than another


@dataclass(frozen=True)
class Problem:
    """A consumer that has moments of every tap of its inputs, and what of them is kept."""

    consumer: Consumer
    kept: Tensor  # (inputs,): flags
    weight: Tensor  # (outputs, inputs, taps), in float64
    mixed: Tensor  # (outputs, inputs · taps): times the covariance
    before: Before
    moments: Moments

    @property
    def rows(self) -> int:
        """How many inputs of the regression are kept."""
        return int(self.kept.sum()) * self.weight.shape[2]


@dataclass(frozen=True)
class Answer:
    """New values around a consumer; `good` is a flag that must hold of them."""

    values: dict[str, Tensor]
    error: Tensor
    good: Tensor


def shape_of(consumer: Consumer, state: Mapping[str, Tensor]) -> Hashable:
    """Consumers for which this is equal can be solved in one go."""
    weight = state[consumer.weight]
    axes = consumer.output_axis, consumer.axis
    alike = consumer.kind, consumer.norm is not None
    return tuple(weight.shape), axes, weight.dtype, weight.device, *alike


def solve_together(
    method: Method,
    problems: Sequence[Problem],
    state: Mapping[str, Tensor],
    rescales: bool = False,
) -> list[Answer] | None:
    """An answer to each of several problems of one shape; None where the method has no such way.

    `rescales`: the variance of outputs goes into the weights.
    """
    # Those of one consumer follow each other.
    order = sorted(range(len(problems)), key=lambda i: problems[i].consumer.name)
    sorted_problems = [problems[i] for i in order]
    found = method.rewrite_alike(_regressions(sorted_problems))
    if found is None:
        return None
    shift, weight = _shift(sorted_problems, found), found.weight
    if rescales:
        weight, shift = rescaled(weight, shift)
    weights, finite = _weights(sorted_problems, weight, state)
    corrected, all_finite = _corrected(method, sorted_problems, shift, state)
    olds = torch.stack([p.weight.abs().amax() for p in sorted_problems])
    sound = weight.abs().amax((1, 2)) <= ABSURD * olds
    good = (found.good & finite & all_finite & sound).unbind()
    errors = shift.error.unbind()
    made = {
        number: Answer({**weights[i], **corrected[i]}, errors[i], good[i])
        for i, number in enumerate(order)
    }
    return [made[i] for i in range(len(problems))]


def _regressions(problems: Sequence[Problem]) -> list[Regression]:
    """Problems of one consumer, which follow each other, are choices of one regression."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.consumer.name, []).append(problem)
    made = []
    for first, *others in groups.values():
        flags = torch.stack([p.kept for p in (first, *others)])
        flat, taps = first.weight.flatten(1), first.weight.shape[2]
        covariance = first.moments.covariance.to(flat)
        made.append(Regression(flat, covariance, first.mixed, flags, taps))
    return made


def _shift(problems: Sequence[Problem], found: Regressed) -> Shift:
    """How the outputs move, (problems, outputs)."""
    means = torch.stack([p.moments.mean.flatten() for p in problems]).to(found.weight)
    before = Before.of_several([p.before for p in problems])
    means = means.gather(1, found.rows)
    return known_shift(before, found.weight, means, found.mixed, found.across)


def _weights(
    problems: Sequence[Problem], flat: Tensor, state: Mapping[str, Tensor]
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """New weights as the model holds them, less what was filled up, and whether they are finite."""
    held = flat.to(state[problems[0].consumer.weight].dtype)
    made = []
    for one, problem in zip(held, problems):
        consumer, taps = problem.consumer, problem.weight.shape[2]
        matrix = one[:, : problem.rows].unflatten(1, (-1, taps))
        weight = from_matrix(matrix, consumer, state[consumer.weight])
        made.append({consumer.weight: weight})
    return made, held.sum((1, 2)).isfinite()


def _corrected(
    method: Method,
    problems: Sequence[Problem],
    shift: Shift,
    state: Mapping[str, Tensor],
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """What is put back behind every consumer, as the model holds it, and whether it is finite."""
    norms = [p.consumer.norm for p in problems]
    first = norms[0]
    if first is None or method.correction == "none":
        one_by_one = zip(shift.mean, shift.variance, shift.error, shift.total)
        several = [
            corrected_values(p.consumer, Shift(*parts), state, method.correction, True)
            for p, parts in zip(problems, one_by_one)
        ]
        return [as_held(values, state) for values in several], shift.mean.sum(1).isfinite()
    names = [moved_by(norm, method.correction) for norm in norms if norm is not None]
    together = [torch.stack([state[n].detach() for n in each]) for each in zip(*names)]
    eps = torch.tensor([[norm.eps] for norm in norms if norm is not None], dtype=torch.float64)
    moved = corrected_norm(together, onto(eps, shift.mean.device), shift)
    moved = [new.to(old.dtype) for new, old in zip(moved, together)]
    finite = torch.stack([new.sum(1).isfinite() for new in moved]).all(0)
    rows = zip(*(new.unbind() for new in moved))
    return [dict(zip(own, values)) for own, values in zip(names, rows)], finite
