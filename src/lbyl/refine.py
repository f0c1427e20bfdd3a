"""Refinement: the filters that stayed bend too, until readers say again what they said before.

A closed form can only rewrite readers. Here the original and the slim network run on the same
procedural inputs, BatchNorm going by the batch, and gradient steps move every parameter that lost
something, so that the output of each reader (behind its BatchNorm, where it has one) comes back to
the original's. No data, no labels, inputs drawn anew for every step. Steps are relative to the size
of a tensor and to the error there is to undo, and where the first ones do harm they begin again
smaller, so that one rate serves all networks; they shrink to nothing in a line. What does not help
on inputs that no step has seen is taken back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.channels import Axis
from lbyl.exceptions import LbylError
from lbyl.listen import Function, NormListener
from lbyl.record import Inputs, call_model, evaluation_mode
from lbyl.statistics.gather import Passes, Progress
from lbyl.statistics.recalibrate import recalibrate
from lbyl.surgery import readers_cut, tensors
from lbyl.unit import Consumer, Graph

RATE = 0.03  # the first step, in root mean squares of a tensor times the error to be undone
TRIAL, SMALLER, TRIES = 4, 3, 5  # steps after which to look, and to begin again smaller if they
HARM = 1.02  # made the distance so much larger: by less, it may be chance
PATIENT = 100  # with fewer steps than this each is smaller, for there are few to undo its noise
BETAS = (0.9, 0.99)  # of Adam, whose usual long memory of squares is no use in tens of steps
ANY_VARIANCE = (1e-6, 1e6)  # filters that bend may change the scale of what they give

Heard = Callable[[str, int, Tensor], None]
"""Called with a reader's name, the axis its channels lie along, and what it says."""


class Readers(NormListener):
    """Listens to readers, and lets BatchNorm normalise by the batch where that is wanted."""

    def __init__(
        self, model: nn.Module, readers: Sequence[Consumer], by_batch: bool, heard: Heard
    ) -> None:
        super().__init__(by_batch)
        state = tensors(model)
        self.norms = {id(state[c.norm.mean]): c for c in readers if c.norm is not None}
        self.layers = {id(state[c.weight]): c for c in readers if c.norm is None}
        self.heard = heard

    def hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.batch_norm:
            normed = self.normalise(args, kwargs)
            reader = self.norms.get(id(args[1]))
            if reader is not None:
                self.heard(reader.name, 1, normed)
            return normed
        out = func(*args, **kwargs)
        # The weight is the second argument, or the third of addmm(bias, x, weight).
        found = [self.layers[id(x)] for x in args[1:3] if id(x) in self.layers]
        if found and isinstance(out, Tensor) and out.dim() > 1:
            self.heard(found[0].name, -1 if found[0].kind == "linear" else 1, out)
        return out


@dataclass
class Imitation:
    """An original, its slim copy, and how far apart their readers are."""

    original: nn.Module
    slim: nn.Module
    graph: Graph
    indices: Mapping[Axis, Tensor]
    by_batch: bool = True  # how BatchNorm normalises

    def __post_init__(self) -> None:
        self.readers = readers_cut(self.graph, self.indices)
        self.rows = {
            c.name: self.indices.get((c.norm.mean, 0) if c.norm else (c.weight, c.output_axis))
            for c in self.readers
        }

    def bendable(self) -> list[nn.Parameter]:
        """The parameters that lost something; what was left alone stays alone."""
        before = dict(self.original.named_parameters())
        return [
            p
            for name, p in self.slim.named_parameters()
            if p.dtype.is_floating_point and name in before and p.shape != before[name].shape
        ]

    def distance(self, inputs: Inputs) -> Tensor:
        """Squared distance of what readers say, relative to its variance, summed over readers."""
        wanted: dict[str, list[Tensor]] = {}
        apart: list[Tensor] = []

        def remember(name: str, axis: int, said: Tensor) -> None:
            rows = self.rows[name]
            # A copy either way: an activation in place would change it behind our back.
            kept = said.clone() if rows is None else said.index_select(axis, rows.to(said.device))
            wanted.setdefault(name, []).append(kept)

        def compare(name: str, axis: int, said: Tensor) -> None:
            if wanted.get(name):
                apart.append(relative_distance(said, wanted[name].pop(0), axis))

        listener = Readers(self.original, self.readers, self.by_batch, remember)
        with evaluation_mode(self.original), torch.no_grad(), listener:
            call_model(self.original, inputs)
        listener = Readers(self.slim, self.readers, self.by_batch, compare)
        with evaluation_mode(self.slim), listener:
            call_model(self.slim, inputs)
        return torch.stack(apart).sum() if apart else torch.zeros(())


def relative_distance(said: Tensor, wanted: Tensor, axis: int) -> Tensor:
    """Mean squared difference over the mean variance of the channels wanted."""
    if said.shape != wanted.shape:
        raise LbylError("a reader of the slim model gives another shape than the original's")
    said, wanted = said.float().movedim(axis, -1), wanted.float().movedim(axis, -1)
    spread = wanted.flatten(0, -2).var(0, unbiased=False).mean()
    return (said - wanted).square().mean() / (spread + 1e-12)


def refine(
    original: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    steps: int,
    inputs: Iterator[Inputs],
    settling: Passes | None,
    progress: Progress | None = None,
) -> bool:
    """Let `slim` (changed in place) imitate `original`; whether it came nearer on fresh inputs.

    With inputs for `settling` BatchNorm goes by the batch and its running statistics are moved on
    those afterwards; without them it works in its ordinary mode.
    """
    if torch.is_inference_mode_enabled():
        raise LbylError("refine= needs gradients: call compress outside of torch.inference_mode()")
    task = Imitation(original, slim, graph, indices, by_batch=settling is not None)
    held = next(inputs)
    parameters = task.bendable()
    with torch.no_grad():
        first = float(task.distance(held))
    if not parameters or first == 0:
        return False
    before = [p.detach().clone() for p in parameters]

    def nearer(than: float = 1.0) -> bool:
        """Whether the steps so far have helped; if not, they are taken back."""
        with torch.no_grad():
            if float(task.distance(held)) < than * first:  # NaN is not
                return True
            for parameter, old in zip(parameters, before):
                parameter.copy_(old)
        return False

    rate = RATE * min(1.0, steps / PATIENT) * (first / len(task.readers)) ** 0.5
    with torch.enable_grad(), wanting_gradients(parameters):
        rates = (rate / SMALLER**i for i in range(TRIES))
        found = any(_descend(task, parameters, r, steps, inputs, nearer, progress) for r in rates)
    if found and settling is not None and graph.norms:
        with torch.no_grad():
            recalibrate(original, slim, graph, indices, settling, 1.0, ANY_VARIANCE)
    return found


def _descend(
    task: Imitation,
    parameters: list[nn.Parameter],
    rate: float,
    steps: int,
    inputs: Iterator[Inputs],
    nearer: Callable[..., bool],
    progress: Progress | None,
) -> bool:
    """Adam, each tensor at a rate of its own; given up where the first steps do harm."""
    groups = [
        {"params": [p], "lr": rate * float(p.detach().square().mean().sqrt())} for p in parameters
    ]
    optimiser = torch.optim.Adam(groups, betas=BETAS, eps=1e-12)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for step in range(steps):
        gradients = torch.autograd.grad(task.distance(next(inputs)), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimiser.step()
        schedule.step()
        if progress:
            progress("refining", step + 1, steps)
        optimiser.zero_grad()
        if step + 1 == TRIAL < steps and not nearer(HARM):
            return False
    return nearer()


@contextmanager
def wanting_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients for these inside, every parameter as it was afterwards."""
    flags = [p.requires_grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in zip(parameters, flags):
            parameter.requires_grad_(flag)


def check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise LbylError(f"refine is {steps!r}: give a number of steps, 0 for none (100 is plenty)")


def own_inputs(passes: Passes) -> Iterator[Inputs]:
    """A user's own inputs over and over; the first are set aside to judge by, if there are more."""
    batches = list(passes.batches)
    return itertools.chain(batches[:1], itertools.cycle(batches[1:] or batches))
