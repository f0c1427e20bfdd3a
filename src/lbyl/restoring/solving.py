"""A consumer's new weight, and what is put back behind it.

Allocations that are tried share much: what a consumer makes of all its inputs, and solutions for
inputs that several of them keep. Both are remembered as far as memory allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Consumer, Graph
from lbyl.graph.weights import as_matrix, from_matrix
from lbyl.methods.base import Delivery, Method, Rewrite
from lbyl.restoring.correct import (
    Before,
    Shift,
    as_held,
    corrected_values,
    is_rescaled,
    is_worse_than_cut,
    known_shift,
    output_before,
    output_shift,
    rescaled,
)
from lbyl.restoring.together import ABSURD, Problem, shape_of, solve_together
from lbyl.runtime.assumptions import assuming, holds
from lbyl.runtime.memory import ROOM, alike_in_chunks
from lbyl.runtime.notes import Note, at, note, noting, repeat
from lbyl.runtime.run import device_of
from lbyl.runtime.tensors import can_take_bias, is_finite, numbers, onto, places, tensors
from lbyl.statistics.moments import Moments, Statistics

REMEMBERED = 1 << 28  # numbers of solutions and products
FEW = 4  # problems that are not worth putting side by side


@dataclass(frozen=True)
class Request:
    """A consumer that is to be solved, and what of its inputs is kept."""

    consumer: Consumer
    columns: Tensor  # flags of its input columns
    deliveries: dict[str, Delivery]
    kept: dict[str, Tensor]

    @cached_property
    def key(self) -> tuple[str, bytes]:
        return self.consumer.name, self.columns.numpy().tobytes()


@dataclass(frozen=True)
class Solution:
    """New values around a consumer; all of its outputs are there."""

    values: dict[str, Tensor]  # its weight for the kept inputs, its BatchNorm's statistics or bias
    error: float | None  # of its output on the statistics, where there are any
    finite: bool  # whether all values are
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class Original:
    """A consumer before anything was pruned."""

    weight: Tensor  # (outputs, inputs, taps), in float64
    mixed: Tensor | None = None  # (outputs, rows): arranged, times the covariance, where they fit
    before: Before | None = None


@dataclass(frozen=True)
class Unseen:
    """A solution that nobody has looked at yet, and what must hold of it."""

    values: dict[str, Tensor]
    error: Tensor | None
    conditions: list[Tensor]
    notes: tuple[Note, ...]


@dataclass
class Solver:
    """Solves consumers of one network by one method on one collection of statistics."""

    model: nn.Module
    graph: Graph
    method: Method
    statistics: Statistics | None
    remembers: bool = False  # for several plans; one plan asks for each consumer once
    _known: dict[tuple[str, bytes], Solution] = field(default_factory=dict, repr=False)
    _originals: dict[str, Original] = field(default_factory=dict, repr=False)
    _room: int = REMEMBERED  # for so many numbers more

    @cached_property
    def state(self) -> dict[str, Tensor]:
        return tensors(self.model)

    @property
    def _keeps(self) -> bool:
        """What mixes channels of a unit depends on more than on what a consumer keeps."""
        return self.remembers and not self.method.by_unit

    def __call__(self, request: Request) -> Solution:
        """The solution where these input columns of a consumer are kept."""
        solution = self.shared(request)
        if not self._keeps:
            return solution
        # Running statistics move in place once a network has them: what is remembered must not.
        weight = request.consumer.weight
        own = {n: v if n == weight else v.clone() for n, v in solution.values.items()}
        return replace(solution, values=own)

    def shared(self, request: Request) -> Solution:
        """The same with values that may be remembered: for those who only read them."""
        key, new = request.key, request.key not in self._known
        self.solve([request])
        solution = self._known[key] if self._keeps else self._known.pop(key)
        repeat(solution.notes)
        if new and self._keeps and self._room < 0:
            del self._known[key]
        return solution

    def solve(self, requests: Iterable[Request]) -> None:
        """Solve those that are not known yet; a device is waited for once."""
        waiting = {r.key: r for r in requests if r.key not in self._known}
        unseen: dict[tuple[str, bytes], Unseen] = {}
        for some in self._groups(list(waiting.values())):
            if unseen and self._keeps and self._room < 0:  # the others when they are asked for
                break
            found = self._together(some) or [self._unseen(request) for request in some]
            unseen |= {request.key: one for request, one in zip(some, found)}
            held = (v.numel() for one in found for v in one.values.values())
            self._room -= sum(held) if self._keeps else 0
        errors = iter(numbers([u.error for u in unseen.values() if u.error is not None]))
        flags = iter(numbers([c for u in unseen.values() for c in u.conditions]))
        for key, one in unseen.items():
            true = [next(flags) for _ in one.conditions]
            told = None if one.error is None else next(errors)
            if all(true):
                self._known[key] = Solution(one.values, told, True, one.notes)
            else:  # something that nearly always holds did not
                self._known[key] = self._looked_at(waiting[key])

    def _groups(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Those of one shape together on a device; a processor solves each alone as quickly."""
        together: list[Request] = []
        for request in requests:
            if self.in_groups and self._has_products(request):
                together.append(request)
            else:
                yield [request]
        shapes = [shape_of(r.consumer, self.state) for r in together]
        rows = [int(r.columns.sum()) * self._moments(r.consumer).taps for r in together]
        for some in alike_in_chunks(shapes, rows, device_of(self.model)):
            yield [together[i] for i in some]

    @cached_property
    def in_groups(self) -> bool:
        """Whether consumers of one shape are solved in one go."""
        return device_of(self.model).type != "cpu"

    def _has_products(self, request: Request) -> bool:
        """Whether every tap of every input is in the moments, and their mean has a place.

        Where there are so many inputs that few problems would fit, each is better off alone.
        """
        consumer = request.consumer
        moments = self.statistics.get(consumer.name) if self.statistics else None
        if moments is None or moments.columns is not None or bool(request.columns.all()):
            return False
        if FEW * len(moments.covariance) ** 2 > ROOM:
            return False
        shape = self.graph.shapes[consumer.weight]
        return moments.taps == consumer.taps(shape) and self._takes_mean(consumer)

    def _together(self, requests: Sequence[Request]) -> list[Unseen] | None:
        """Solutions of consumers of one shape, in one go; None where that is not to be had."""
        if not self.in_groups or not self._has_products(requests[0]):
            return None
        originals = {r.consumer.name: r.consumer for r in requests}
        known = {name: self._original(consumer) for name, consumer in originals.items()}
        problems = []
        for request in requests:
            consumer, original = request.consumer, known[request.consumer.name]
            if original.mixed is None or original.before is None:
                return None
            own = original.weight, original.mixed, original.before, self._moments(consumer)
            problems.append(Problem(consumer, request.columns, *own))
        rescales = self._rescales(requests[0].consumer)
        answers = solve_together(self.method, problems, self.state, rescales)
        if answers is None:
            return None
        return [Unseen(one.values, one.error, [one.good], ()) for one in answers]

    def _moments(self, consumer: Consumer) -> Moments:
        assert self.statistics is not None
        return self.statistics.moments[consumer.name]

    def _unseen(self, request: Request) -> Unseen:
        """A solution with conditions taken for granted."""
        with assuming() as conditions, noting() as notes, at(request.consumer.name):
            values, shift = self._solve(request)
            all_finite(values)
        error = None if shift is None else shift.error
        return Unseen(values, error, conditions, tuple(notes))

    def _looked_at(self, request: Request) -> Solution:
        """A solution with every condition looked at where it arises."""
        with noting() as notes, at(request.consumer.name):
            values, shift = self._solve(request)
        error = None if shift is None else float(shift.error)
        return Solution(values, error, all_finite(values), tuple(notes))

    def _solve(self, request: Request) -> tuple[dict[str, Tensor], Shift | None]:
        consumer = request.consumer
        moments = self.statistics.get(consumer.name) if self.statistics else None
        weight = self.state[consumer.weight]
        original = self._original(consumer)
        rewrite = Rewrite(
            self.graph,
            consumer,
            original.weight,
            request.columns,
            request.deliveries,
            request.kept,
            moments,
            original.mixed,
            takes_mean=self._takes_mean(consumer),
        )
        new, shift = _rewritten(self.method, rewrite, original.before)
        if shift is not None and rewrite.takes_mean and self._rescales(consumer):
            new, shift = rescaled(new, shift)
        values = {consumer.weight: from_matrix(new, consumer, weight)}
        values |= self._corrected(consumer, shift)
        # Outputs may become mixtures yet, which are made in full precision.
        return values if self.method.by_unit else as_held(values, self.state), shift

    def _rescales(self, consumer: Consumer) -> bool:
        return is_rescaled(consumer, self.graph, self.method.correction)

    def _original(self, consumer: Consumer) -> Original:
        """What is the same for every plan, and remembered for several."""
        known = self._originals.get(consumer.name)
        if known is not None:
            return known
        weight = as_matrix(self.state[consumer.weight], consumer)
        moments = self.statistics.get(consumer.name) if self.statistics else None
        if moments is None or not self.method.needs_statistics:
            return Original(weight)
        arranged = moments.arrange(weight)
        if moments.taps != arranged.shape[2]:
            return Original(weight)
        mixed = moments.mixed
        if mixed is None:
            mixed = arranged.flatten(1) @ moments.covariance.to(arranged)
        made = Original(weight, mixed, output_before(moments, arranged, mixed))
        if self.remembers and self._room >= 0:
            self._originals[consumer.name] = made
            self._room -= 2 * mixed.numel()
        return made

    def _corrected(self, consumer: Consumer, shift: Shift | None) -> dict[str, Tensor]:
        """What is put back behind a consumer, in full output size."""
        if shift is None:
            return {}
        allowed = self._takes_mean(consumer)
        return corrected_values(consumer, shift, self.state, self.method.correction, allowed)

    def _takes_mean(self, consumer: Consumer) -> bool:
        """Whether the mean of what went has a place behind a consumer, or gets one."""
        return consumer.bias is not None or consumer.norm is not None or self._grows(consumer)

    def _grows(self, consumer: Consumer) -> bool:
        """Whether a consumer that has no place for a mean gets a bias."""
        if consumer.bias is not None or consumer.norm is not None:
            return False
        allowed = getattr(self.method, "new_bias", True)
        return bool(allowed) and can_take_bias(self.model, consumer.name)

    def bare(self, consumers: Iterable[Consumer]) -> list[str]:
        """The consumers that get a bias when they lose inputs."""
        if self.statistics is None or self.method.correction == "none":
            return []
        return [consumer.name for consumer in consumers if self._grows(consumer)]


def _rewritten(
    method: Method, rewrite: Rewrite, before: Before | None
) -> tuple[Tensor, Shift | None]:
    """A consumer's new weight and how its output moves; where that does harm, it is only cut."""
    old, columns, moments = rewrite.weight, rewrite.kept_columns, rewrite.moments
    new = method.rewrite(rewrite)
    found = next((one for one in rewrite.found if one.weight is new), None)
    # Inputs that never vary leave rounding divided by rounding.
    sound = holds(new.abs().amax() <= ABSURD * old.abs().amax()) if new.numel() else True
    if sound and found is not None and moments is not None and before is not None:
        mean = moments.mean.flatten().to(found.flat)[found.rows]
        return new, known_shift(before, found.flat, mean, found.mixed, found.across)
    cut_only = old[:, onto(columns, old.device)]
    if not (sound and is_finite(new)):
        note("only cut: what it should take over is not finite, or beyond all measure")
        new = cut_only
    if moments is None:
        return new, None
    shift = output_shift(moments, old, new, columns, rewrite.mixed)
    # Only a method that went by these moments can be held to them.
    if method.needs_statistics and is_worse_than_cut(moments, old, columns, shift):
        note("only cut: by its statistics restoring it does more harm than good")
        new, shift = cut_only, output_shift(moments, old, cut_only, columns, rewrite.mixed)
    return new, shift


def all_finite(values: Mapping[str, Tensor]) -> bool:
    """Whether values as the model will hold them are finite: half precision ends at 65,504."""
    return is_finite(*floating(values))


def floating(values: Mapping[str, Tensor]) -> list[Tensor]:
    """Values that could be other than finite."""
    return [v for v in values.values() if v.dtype.is_floating_point]


def silenced(solution: Solution, consumer: Consumer, columns: Tensor, like: Tensor) -> Tensor:
    """The consumer's weight for all inputs, zeros where they are pruned: nobody reads those."""
    full = torch.zeros_like(like)
    where = places(columns, like.device)
    return full.index_copy(consumer.axis, where, solution.values[consumer.weight])
