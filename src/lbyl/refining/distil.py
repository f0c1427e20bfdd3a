"""Refinement: the slim network is trained to give the original's outputs at every cut consumer.

A closed form can only rewrite consumers. Here the original (the teacher) and the slim network (the
student) run on the same procedural inputs, BatchNorm normalising by the batch. The trainable
parameters are all that lost channels; the loss is the error of each consumer's output (behind its
BatchNorm, where it has one), relative to the variance of the teacher's. No data, no labels, inputs
drawn anew for every step. A language model runs on text that it wrote itself, on which its answers
mean something: how far the student's chances of tokens diverge from the teacher's is part of the
loss there. Steps are relative to the size of a tensor and to the error there is to
undo; where the first ones raise the loss they begin again smaller, so that one rate serves all
networks; they shrink linearly to zero. What does not lower the loss on inputs that no step has seen
is undone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.graph.unit import Axis, Consumer, Graph
from lbyl.graph.watch import NormCall, Watch
from lbyl.inputs.batches import InputBatches
from lbyl.inputs.text.writing import scores_of
from lbyl.refining.descent import Adam, differentiated, requiring_gradients
from lbyl.restoring.recalibrate import recalibrate
from lbyl.runtime.answers import SCORES, thinned
from lbyl.runtime.format import counted
from lbyl.runtime.intercept import Function
from lbyl.runtime.notes import note
from lbyl.runtime.processes import agreed, averaged, rank_and_size
from lbyl.runtime.recording import Recorded
from lbyl.runtime.run import Inputs, Progress, call_model, device_of, evaluation_mode
from lbyl.runtime.tensors import select, tensors
from lbyl.surgery.indices import consumers_cut

RATE = 0.03  # the first step, in root mean squares of a tensor times the error to be undone
TRIAL, SMALLER, TRIES = 4, 3, 5  # steps after which to look, and to begin again smaller if they
HARM = 1.02  # made the loss so much larger: by less, it may be chance
PATIENT = 100  # with fewer steps than this each is smaller, for there are few to undo its noise
AUTO = "auto"  # in place of a number of steps: rounds of so many, until one
ROUNDS, ENOUGH = (100, 200, 400, 800), 0.97  # no longer lowers the loss to this part of it
ANSWERS = 1.0  # weight of the divergence of a language model's answers, in nats a token
ANY_VARIANCE = (1e-6, 1e6)  # trained filters may change the scale of their output
# Functions by which a network differentiates, and how many arguments stand before `retain_graph`.
DIFFERENTIATE: dict[Function, int] = {torch.autograd.grad: 3, Tensor.backward: 2}
Steps = int | Literal["auto"]
OutputCallback = Callable[[str, int, Tensor], None]
"""Called with a consumer's name, the axis its channels lie along, and its output."""


class ConsumerOutputs(Watch):
    """Hands on the output of every consumer, behind its BatchNorm where it has one."""

    frozen = True

    def __init__(
        self,
        model: nn.Module,
        consumers: Sequence[Consumer],
        by_batch: bool,
        callback: OutputCallback,
    ) -> None:
        super().__init__(model, [c for c in consumers if c.norm is None], by_batch)
        state = tensors(model)
        self.norms = {id(state[c.norm.mean]): c for c in consumers if c.norm is not None}
        self.callback = callback

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        most = DIFFERENTIATE.get(func)
        if most is not None and len(args) <= most:  # the loss goes back the same way once more
            kwargs = {**kwargs, "retain_graph": True}
        return super().on_call(func, args, kwargs)

    def after_norm(self, call: NormCall, out: Tensor) -> None:
        consumer = self.norms.get(id(call.mean))
        if consumer is not None:
            self.callback(consumer.name, 1, out)

    def after_layer(self, consumer: Consumer, out: Tensor) -> None:
        if out.dim() > 1:
            self.callback(consumer.name, -1 if consumer.kind == "linear" else 1, out)


@dataclass(frozen=True)
class Refinement:
    """What refinement did."""

    asked: int  # steps; those that were tried where it was to stop by itself
    steps: int  # that were kept: 0 where they were taken back
    loss_before: float  # on inputs that no step saw
    loss_after: float

    def __str__(self) -> str:
        if not self.steps:
            return f"refinement taken back ({counted(self.asked, 'step')} did not help)"
        return (
            f"refined by {counted(self.steps, 'step')} "
            f"(loss {self.loss_before:.3g} → {self.loss_after:.3g})"
        )


@dataclass
class Distillation:
    """A teacher (the original), a student (its slim copy) and the loss between their consumers."""

    teacher: nn.Module
    student: nn.Module
    graph: Graph
    indices: Mapping[Axis, Tensor]
    by_batch: bool = True  # how BatchNorm normalises
    vocabulary: int | None = None  # of a language model, whose answers are compared as well

    def __post_init__(self) -> None:
        self.consumers = consumers_cut(self.graph, self.indices)
        device = device_of(self.teacher)
        self.rows = {}
        for c in self.consumers:
            rows = self.indices.get((c.norm.mean, 0) if c.norm else (c.weight, c.output_axis))
            self.rows[c.name] = None if rows is None else rows.to(device)
        self._targets: dict[str, list[Tensor]] = {}
        self._errors: list[Tensor] = []
        self._compared: dict[str, int] = {}  # calls of each consumer
        self._variances: dict[tuple[str, int], Tensor] = {}
        self._shown: list[Tensor] = []  # masks of the batch: tokens that are no padding

    @property
    def terms(self) -> int:
        """How many errors the loss is the sum of."""
        return len(self.consumers) + (self.vocabulary is not None)

    def trainable(self) -> list[nn.Parameter]:
        """The trainable parameters: those of the student that lost channels."""
        before = dict(self.teacher.named_parameters())
        return [
            p
            for name, p in self.student.named_parameters()
            if p.dtype.is_floating_point and name in before and p.shape != before[name].shape
        ]

    @cached_property
    def _teacher_watch(self) -> ConsumerOutputs:
        return ConsumerOutputs(self.teacher, self.consumers, self.by_batch, self._keep_target)

    @cached_property
    def _student_watch(self) -> ConsumerOutputs:
        return ConsumerOutputs(self.student, self.consumers, self.by_batch, self._compare)

    def _keep_target(self, name: str, axis: int, output: Tensor) -> None:
        rows = self.rows[name]
        # A copy either way: an activation in place would change it behind our back.
        kept = output.clone() if rows is None else select(output, axis, rows.to(output.device))
        calls = self._targets.setdefault(name, [])
        # The scale of a call's error: measured on the first inputs, the same for all that follow.
        if (name, len(calls)) not in self._variances:
            self._variances[name, len(calls)] = mean_variance(kept, axis)
        calls.append(kept)

    def _compare(self, name: str, axis: int, output: Tensor) -> None:
        call = self._compared.get(name, 0)
        if call < len(self._targets.get(name, ())):
            target, variance = self._targets[name][call], self._variances[name, call]
            shown = next((m for m in self._shown if m.shape == output.shape[:-1]), None)
            self._errors.append(relative_error(output, target, variance, shown))
            self._compared[name] = call + 1

    def loss(self, inputs: Inputs) -> Tensor:
        """Squared error of each consumer's output over the teacher's variance, summed."""
        self._targets, self._errors, self._compared = {}, [], {}
        self._shown = masks_of(inputs)
        with evaluation_mode(self.teacher), torch.no_grad(), self._precision(), self._teacher_watch:
            wanted = call_model(self.teacher, inputs)
        with evaluation_mode(self.student), self._precision(), self._student_watch:
            given = call_model(self.student, inputs)
        errors, self._targets, self._errors = self._errors, {}, []
        if self.vocabulary is not None:
            errors.append(ANSWERS * self._divergence(wanted, given, self.vocabulary))
        return torch.stack(errors).sum() if errors else torch.zeros(())

    def _divergence(self, wanted: Any, given: Any, vocabulary: int) -> Tensor:
        """Of the chances that the student gives to tokens from the teacher's, of all places."""
        teacher, student = scores_of(wanted, vocabulary), scores_of(given, vocabulary)
        if teacher is None or student is None:
            return torch.zeros((), device=device_of(self.student))
        shown = next((m for m in self._shown if m.shape == teacher.shape[:2]), None)
        p, q = (
            thinned(x.flatten(0, 1), SCORES).float().log_softmax(-1) for x in (teacher, student)
        )
        by_place = (p.exp() * (p - q)).sum(-1)
        if shown is None:
            return by_place.mean()
        step = -(-shown.numel() // len(by_place))
        weight = shown.flatten()[::step].to(by_place)
        return (by_place * weight).sum() / weight.sum().clamp(min=1)

    def _precision(self) -> torch.autocast:
        """bfloat16 on a GPU, where it is several times as fast; the loss is in float32."""
        kind = device_of(self.teacher).type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")


class SquaredError(torch.autograd.Function):
    """The sum of squared differences, in float32 also where the outputs are in half of it.

    One pass over the outputs forwards and one backwards: the usual way makes six, in float32, and
    on a GPU takes longer than the convolutions.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        # A difference of its own: activations in place change the output that a loss would keep.
        difference = output - target
        ctx.save_for_backward(difference)
        exact = torch.promote_types(difference.dtype, torch.float32)
        return torch.linalg.vector_norm(difference, dtype=exact).square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * (2 * gradients[0]).to(difference.dtype), None


def mean_variance(target: Tensor, axis: int) -> Tensor:
    """The variance of a target's channels (along `axis`), their mean; float32."""
    axis %= target.dim()
    others = [d for d in range(target.dim()) if d != axis]
    return target.float().var(others, correction=0).mean()


def relative_error(
    output: Tensor, target: Tensor, variance: Tensor, shown: Tensor | None = None
) -> Tensor:
    """Mean squared difference over the variance of the target, of rows that no mask hides."""
    if output.shape != target.shape:
        raise LbylError("a consumer of the slim model gives another shape than the original's")
    numbers: Tensor | int = output.numel()
    if shown is not None:
        weight = shown[..., None].to(output.dtype)
        output, target = output * weight, target * weight
        numbers = (shown.sum() * output.shape[-1]).clamp(min=1)
    total: Tensor = SquaredError.apply(output, target)
    return total / (numbers * (variance + 1e-12))


def masks_of(inputs: Inputs) -> list[Tensor]:
    """Masks (sequences, length) among inputs by name; what they hide is padding."""
    if not isinstance(inputs, Mapping):
        return []
    named = [x for name, x in inputs.items() if str(name).endswith("mask")]
    return [x != 0 for x in named if isinstance(x, Tensor) and x.dim() == 2]


def refine(
    original: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    steps: Steps,
    inputs: Iterator[Inputs],
    second_pass: InputBatches | None,
    progress: Progress | None = None,
    vocabulary: int | None = None,
) -> Refinement:
    """Train `slim` (in place), the student, towards `original`, the teacher, a batch a step.

    With inputs for a `second_pass` BatchNorm normalises by the batch and its running statistics are
    recalibrated on those afterwards; without them it works in its ordinary mode.
    """
    if torch.is_inference_mode_enabled():
        raise LbylError("refine= needs gradients: call compress outside of torch.inference_mode()")
    by_batch = second_pass is not None
    task = Distillation(original, slim, graph, indices, by_batch, vocabulary)
    descent = Descent(task, inputs, next(inputs), progress)
    rounds = rounds_of(steps)
    first = last = descent.loss()
    asked = taken = 0
    if not math.isfinite(first):
        note("not refined: outputs of the two networks differ by what is not finite")
        return Refinement(sum(rounds), 0, 0.0, 0.0)
    for count in rounds:
        asked += count
        if not descent.parameters or last == 0:
            break
        before, last = last, descent.run(count, last)
        taken += count if last < before else 0
        if last > ENOUGH * before:
            break
    if taken and second_pass is not None and graph.norms:
        with torch.no_grad():
            recalibrate(original, slim, graph, indices, second_pass, 1.0, ANY_VARIANCE)
    return Refinement(asked, taken, first, last)


@dataclass
class Descent:
    """Rounds of steps on the parameters of a student; a round that does not help is undone."""

    task: Distillation
    inputs: Iterator[Inputs]
    held: Inputs  # which no step sees
    progress: Progress | None = None

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        return self.task.trainable()

    @cached_property
    def gradients(self) -> Recorded:
        return differentiated(self.task.loss, self.parameters)

    @torch.no_grad()
    def loss(self) -> float:
        """On the inputs held out."""
        return agreed(float(self.task.loss(self.held)))

    def run(self, steps: int, first: float) -> float:
        """The loss after a round of steps, from `first` before it."""
        rate = RATE * min(1.0, steps / PATIENT) * (first / self.task.terms) ** 0.5
        before = [p.detach().clone() for p in self.parameters]
        with torch.enable_grad(), requiring_gradients(self.parameters):
            for i in range(TRIES):
                last = self._descend(rate / SMALLER**i, steps, first)
                if last is not None and last < first:  # NaN is not
                    return last
                with torch.no_grad():
                    torch._foreach_copy_(list(self.parameters), before)
        return first

    def _descend(self, rate: float, steps: int, first: float) -> float | None:
        """Adam, each tensor at a rate of its own; None where the first steps do harm."""
        rates = [rate * float(p.detach().square().mean().sqrt()) for p in self.parameters]
        optimiser = Adam(self.parameters, rates)
        for step in range(steps):
            optimiser.step(averaged(self.gradients(_mine(next(self.inputs)))), 1 - step / steps)
            if self.progress:
                self.progress("refining", step + 1, steps)
            if step + 1 == TRIAL < steps and not self.loss() < HARM * first:
                return None
        return self.loss()


def _mine(inputs: Inputs) -> Inputs:
    """This process's share of a batch: every n-th example; all of one too small to be shared."""
    rank, size = rank_and_size()
    rows = [len(x) for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.dim()]
    if size == 1 or not rows or min(rows) < 2 * size or len(set(rows)) > 1:
        return inputs
    return tree_map_only(Tensor, lambda x: x[rank::size] if x.dim() else x, inputs)


def rounds_of(steps: Steps) -> tuple[int, ...]:
    """How many steps are taken between two looks at whether they help."""
    return (steps,) if isinstance(steps, int) else ROUNDS


def check_steps(steps: object) -> None:
    if steps == AUTO:
        return
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise LbylError(
            f"refine is {steps!r}: give a number of steps (0 for none, 100 is plenty) or 'auto'"
        )


def own_inputs(inputs: InputBatches) -> Iterator[Inputs]:
    """A user's own inputs over and over; the first batch is held out where there are more."""
    batches = list(inputs.batches)
    return itertools.chain(batches[:1], itertools.cycle(batches[1:] or batches))
