"""How far a slim network's outputs are from the original's, on inputs that nothing was fitted on.

It is what allocations and criteria are chosen by: no label is needed, and unlike errors of single
layers it sees what the whole network makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lbyl.graph.watch import Watch
from lbyl.inputs.text.writing import scores_of
from lbyl.runtime.answers import (
    SCORES,
    half_sure,
    is_answer,
    kl,
    numbers_in,
    relative_error,
    thinned,
)
from lbyl.runtime.memory import free_bytes
from lbyl.runtime.run import Inputs, call_model, evaluation_mode
from lbyl.runtime.tensors import numbers
from lbyl.scoring.scratch import Scratch
from lbyl.scoring.side_by_side import CannotBeSplit, Values, rows_of, run_side_by_side

ALIKE = 0.02  # by which a divergence may differ with the size of the batch, relatively
TOGETHER = 96  # variants that run at once, of inputs no larger in all
AT_ONCE = 3 << 19  # than so many numbers on a processor, and on a device than fit into its memory:
BYTES = 512  # for a number of the inputs: layers make several of each, and others need room too
FLOOR = 1e-12  # two networks that agree to the last bit are this far apart


@dataclass
class Divergence:
    """Divergence from `model` on `batches`, the geometric mean over ways of normalising.

    BatchNorm as in use tells more where outputs differ much, by the batch where they differ little:
    together they misjudge least. Networks without BatchNorm need one way only. With a `vocabulary`
    the scores of its tokens are what is compared, at a temperature of 1: they are chances already.
    """

    model: nn.Module
    batches: Sequence[Inputs]
    by_batch: Sequence[bool] = (False, True)
    vocabulary: int | None = None
    _temperatures: dict[bool, float] = field(default_factory=dict, repr=False)
    # How variants may run together: with rows from where they differ, or from the beginning.
    # One is left once it was seen to give what each gives alone.
    _ways: tuple[bool, ...] = (False, True)

    @cached_property
    def scratch(self) -> Scratch:
        """The network with other values for a while."""
        return Scratch(self.model)

    @cached_property
    def _in_use(self) -> list[list[Tensor]]:
        return self._of(self.model, False)

    @cached_property
    def _normalised(self) -> list[list[Tensor]]:
        return self._of(self.model, True)

    def _outputs(self, way: bool) -> list[list[Tensor]]:
        """The original's."""
        return self._normalised if way else self._in_use

    def _of(self, model: nn.Module, way: bool) -> list[list[Tensor]]:
        return outputs(model, self.batches, way, self.vocabulary)

    def _temperature(self, way: bool) -> float:
        if self.vocabulary is not None:
            return 1.0
        if way not in self._temperatures:
            scores = torch.cat([out[0] for out in self._outputs(way)])
            self._temperatures[way] = half_sure(scores)
        return self._temperatures[way]

    def __call__(self, slim: nn.Module, normalised: float | None = None) -> float:
        """The divergence; infinite where the slim network gives no finite outputs.

        `normalised` is the one with BatchNorm normalising by the batch, where it is known.
        """
        known = {} if normalised is None else {True: normalised}
        parts = [known[way] if way in known else self._one(slim, way) for way in self.by_batch]
        logs = [math.log(max(part, FLOOR)) for part in parts]
        mean = sum(logs) / len(logs)
        return math.exp(mean) if math.isfinite(mean) else math.inf

    def of_variants(self, variants: Sequence[Values]) -> list[float] | None:
        """The divergence of each variant of `model`, run together; None where they cannot be.

        The network itself runs with them, and the first of all is run alone too: where one differs,
        rows of a batch are not what they seem.
        """
        if list(self.by_batch) != [False] or len(variants) < 3:
            return None
        for at_once in self._ways:
            found = self._together(variants, at_once)
            if found is not None:
                self._ways = (at_once,)
                return found
        self._ways = ()
        return None

    def _together(self, variants: Sequence[Values], at_once: bool) -> list[float] | None:
        try:
            made = self._side_by_side(variants, at_once)
        except Exception:  # whatever the network says to a larger batch
            return None
        original = self._outputs(False)
        parts = numbers([self._distance(original, one, False) for one in made])
        itself, *found = map(_or_infinite, parts)
        if not itself <= ALIKE * max(found) + FLOOR:
            return None
        if len(self._ways) > 1:
            with self.scratch.holding(variants[0]) as first:
                alone = self._between(original, self._of(first, False), False)
            if not abs(found[0] - alone) <= ALIKE * alone + FLOOR:
                return None
        return found

    def _side_by_side(self, variants: Sequence[Values], at_once: bool) -> list[list[list[Tensor]]]:
        """Outputs of the network itself and of every variant, batch by batch."""
        made: list[list[list[Tensor]]] = [[] for _ in range(1 + len(variants))]
        for batch in self.batches:
            rows = rows_of(batch)
            if rows is None:
                raise CannotBeSplit("inputs of several lengths")
            first = max(tree_flatten(batch)[0], key=Tensor.numel)
            limit = numbers_at_once(first.device)
            together = max(1, min(TOGETHER, limit // max(1, first.numel())))
            for start in range(0, len(variants), together):
                some = variants[start : start + together]
                out = run_side_by_side(self.model, some, batch, rows, at_once)
                own, *parts = compared(out, 1 + len(some), self.vocabulary, len(self.batches))
                if not start:
                    made[0].append(own)
                for one, part in zip(made[1 + start :], parts):
                    one.append(part)
        return made

    def _one(self, slim: nn.Module, way: bool) -> float:
        return self._between(self._outputs(way), self._of(slim, way), way)

    def _between(
        self, teacher: list[list[Tensor]], student: list[list[Tensor]], way: bool
    ) -> float:
        return _or_infinite(float(self._distance(teacher, student, way)))

    def _distance(
        self, teacher: list[list[Tensor]], student: list[list[Tensor]], way: bool
    ) -> Tensor:
        alike = [x.shape for out in teacher for x in out] == [x.shape for o in student for x in o]
        if alike and all(is_answer(out) for out in teacher):
            temperature = self._temperature(way)
            parts = [kl(t[0], s[0], temperature) for t, s in zip(teacher, student, strict=True)]
        else:
            parts = [relative_error(t, s) for t, s in zip(teacher, student, strict=True)]
        return torch.cat(parts).mean()


def numbers_at_once(device: torch.device) -> int:
    """How many numbers inputs may hold that run together."""
    if device.type != "cuda":
        return AT_ONCE
    return max(AT_ONCE, free_bytes(device) // BYTES)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


@torch.no_grad()
def outputs(
    model: nn.Module, batches: Sequence[Inputs], by_batch: bool, vocabulary: int | None = None
) -> list[list[Tensor]]:
    """Every floating output of every batch, in float64; of a `vocabulary` only its scores."""
    made = []
    for _, out in answers(model, batches, by_batch):
        made += compared(out, 1, vocabulary, len(batches))
    return made


def compared(
    out: Any, variants: int, vocabulary: int | None = None, batches: int = 1
) -> list[list[Tensor]]:
    """What is compared of an output, for each of several variants that ran together."""
    scores = None if vocabulary is None else scores_of(out, vocabulary)
    found = numbers_in(out) if scores is None else [scores]
    if variants > 1 and any(len(x) % variants for x in found):
        raise CannotBeSplit("an output that is not one for each example")
    parts = [list(some) for some in zip(*(x.tensor_split(variants) for x in found))]
    if scores is None:
        return parts or [[]]
    return [[thinned(x.flatten(0, 1), SCORES // batches).double() for x in some] for some in parts]


@torch.no_grad()
def answers(
    model: nn.Module, batches: Sequence[Inputs], by_batch: bool = False
) -> Iterator[tuple[Inputs, Any]]:
    """Every batch with what the model makes of it."""
    with evaluation_mode(model):
        for batch in batches:
            with Watch(by_batch=True) if by_batch else nullcontext():
                out = call_model(model, batch)
            yield batch, out
