"""How much accuracy a slim network keeps, told without data: agreement with the original.

Both networks run on inputs that nothing was fitted on. How often their answers are equal, and how
far they diverge, is measured; what that means for accuracy is a map that was calibrated once over
many criteria, ratios and methods of several networks (`python -m benchmarks.forecast`), the same
for every network. Its interval held nine settings of ten of networks that it had not been fitted
on; docs/forecast.md says where it is weak.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lbyl.restoring import boxes
from lbyl.restoring.divergence import (
    answers,
    half_sure,
    joined_scores,
    kl,
    numbers_in,
    outputs,
    relative_error,
)
from lbyl.restoring.recalibrate import SecondPass
from lbyl.torchkit.format import percent
from lbyl.torchkit.run import Inputs


@dataclass(frozen=True)
class Forecast:
    """What a slim network keeps, as far as that can be known without labels.

    `kept` is its accuracy over the original's, `low` and `high` bound it in nine cases of ten.
    They are None where outputs are not one vector of scores an example, as a classifier's are, and
    where the original gives `one_answer` to nearly all inputs: of the others nothing can be told.
    Of a detector `boxes` is how many the original found, and `agreement` the share of them and
    of the slim network's that the other found too.
    """

    agreement: float | None  # fraction of equal answers
    divergence: float  # of answers at a fixed certainty; else the relative squared error
    kept: float | None
    low: float | None
    high: float | None
    inputs: int  # compared
    source: str  # "fresh" inputs, or the user's "own"
    boxes: int | None = None  # of a detector: found by the original
    one_answer: bool = False  # whether the original answers nearly all of the inputs alike

    def __str__(self) -> str:
        where = f"on {self.inputs} {self.source} inputs"
        if self.boxes is not None:
            return f"{boxes_agree(self.agreement)} ({self.boxes} of the original's) {where}"
        if self.agreement is None:
            return f"outputs differ from the original's by {self.divergence:.3g} {where}"
        if self.one_answer:
            return (
                f"{percent(self.agreement)} equal answers {where}, which the original answers "
                "alike: what is kept cannot be told"
            )
        if self.kept is None:
            return f"{percent(self.agreement)} equal answers {where}"
        return (
            f"keeps about {percent(self.kept)} of the accuracy ({percent(self.low)} to "
            f"{percent(self.high)}): {percent(self.agreement)} equal answers {where}"
        )


def boxes_agree(agreement: float | None) -> str:
    """The agreement of two detectors in words."""
    if agreement is None:
        return "neither network finds a box"
    return f"{percent(agreement)} of boxes agree in class and place"


@dataclass(frozen=True)
class Signs:
    """What is measured of two networks on the same inputs."""

    agreement: float  # fraction of equal answers
    divergence: float  # of answers, at a temperature where the original is half sure, twice
    correlation: float  # of scores, less the mean of each class and each example

    @property
    def numbers(self) -> dict[str, float]:
        """The same on scales that have no ends: log odds and logarithms, larger being worse."""
        differing = min(max(1 - self.agreement, LEAST), 1 - LEAST)
        alike = min(max(self.correlation, LEAST), 1.0) ** 2
        return {
            "differing": math.log(differing / (1 - differing)),
            "divergence": math.log(min(max(self.divergence, LEAST**2), 1 / LEAST)),
            "correlation": math.log(max(1 / alike - 1, LEAST**2)),
        }


@dataclass(frozen=True)
class Calibration:
    """From signs to accuracy kept: 1 − σ(constant + Σ weight · number).

    `errors` says, for values of that, how far below and above it the truth lies in nine cases of
    ten.
    """

    constant: float
    weights: Mapping[str, float]
    errors: tuple[tuple[float, float, float], ...]  # kept, how far below, how far above; ascending

    def __call__(self, signs: Signs) -> tuple[float, float, float]:
        """Accuracy kept, and the interval around it."""
        if not math.isfinite(signs.divergence):
            return 0.0, 0.0, 0.0
        kept = self.kept(signs)
        below, above = self._errors(kept)
        return kept, max(0.0, kept - below), min(1.0, kept + above)

    def kept(self, signs: Signs) -> float:
        numbers = signs.numbers
        z = self.constant + sum(weight * numbers[name] for name, weight in self.weights.items())
        return 1 / (1 + math.exp(min(z, 50.0)))

    def of_few(self, signs: Signs, inputs: int) -> tuple[float, float, float]:
        """The same where answers were counted on so many inputs: what chance adds is added."""
        counted = replace(signs, agreement=(signs.agreement * inputs + 0.5) / (inputs + 1))
        kept, low, high = self(counted)
        if not math.isfinite(signs.divergence):
            return kept, low, high
        least, most = (
            self.kept(replace(signs, agreement=bound)) for bound in wilson(signs.agreement, inputs)
        )
        below = math.hypot(kept - low, max(0.0, kept - least))
        above = math.hypot(high - kept, max(0.0, most - kept))
        return kept, max(0.0, kept - below), min(1.0, kept + above)

    def _errors(self, kept: float) -> tuple[float, float]:
        """Between two points of the table the straight line."""
        points = self.errors
        for (x0, b0, a0), (x1, b1, a1) in itertools.pairwise(points):
            if kept <= x1:
                t = min(max((kept - x0) / (x1 - x0), 0.0), 1.0)
                return b0 + t * (b1 - b0), a0 + t * (a1 - a0)
        return points[-1][1:]


NINE_OF_TEN = 1.645  # standard deviations either way

HELD = 1 << 25  # values of the original's outputs that are kept to compare with
ALIKE = 0.95  # of the inputs, if one answer is given to more of them, it tells of no other,
FEWEST = 32  # unless they are so few that this is chance
LEAST = 1e-3  # answers that differ less often than this are not told apart
TEMPERATURE = 2.0  # times the one at which the original is half sure

# Fitted by `python -m benchmarks.forecast_fit`; docs/results/forecast.json has the rows.
FRESH = Calibration(
    1.5501,
    {"divergence": 2.3138, "correlation": 0.5518},
    (
        (0.0, 0.1979, 0.3014),
        (0.2, 0.2088, 0.3826),
        (0.4, 0.285, 0.3156),
        (0.6, 0.304, 0.3156),
        (0.8, 0.2281, 0.135),
        (0.9, 0.1483, 0.0656),
        (0.96, 0.0948, 0.0275),
        (1.0, 0.0424, 0.01),
    ),
)
# Of convolutional networks that no norm tells anything about (`Graph.forgot`), fitted by
# `python -m benchmarks.folded --fit`: fresh inputs suit them far less, and bounds are wide.
FORGOT = Calibration(
    0.0322,
    {"correlation": 1.2765},
    (
        (0.0, 0.2667, 0.01),
        (0.2, 0.3757, 0.4205),
        (0.4, 0.4848, 0.4205),
        (0.6, 0.5938, 0.3348),
        (0.8, 0.7028, 0.2492),
        (0.9, 0.6064, 0.1396),
        (0.96, 0.5485, 0.0739),
        (1.0, 0.096, 0.0301),
    ),
)
OWN = Calibration(
    -0.3302,
    {"differing": 1.1393},
    (
        (0.0, 0.0249, 0.0234),
        (0.2, 0.048, 0.0418),
        (0.4, 0.0757, 0.0513),
        (0.6, 0.0879, 0.061),
        (0.8, 0.084, 0.0762),
        (0.9, 0.0681, 0.0707),
        (0.96, 0.0388, 0.0527),
        (1.0, 0.0132, 0.0355),
    ),
)


@dataclass
class Forecaster:
    """Compares networks with `model` on batches, which it runs on once.

    In a `second_pass` scores are also compared with BatchNorm normalising by the batch: that tells
    apart what the network has lost from what its running statistics have.
    """

    model: nn.Module
    batches: Sequence[Inputs]
    source: str = "fresh"
    second_pass: SecondPass | None = None
    calibration: Calibration = FRESH  # of fresh inputs

    @cached_property
    def _answers(self) -> _Answers:
        """The original's, as many as can be held: scores of every token of a text are large."""
        made = _Answers([], [])
        for batch in self.batches:
            if made.size < HELD:
                made.add(self.model, batch)
        return made

    @property
    def _outputs(self) -> list[list[Tensor]]:
        return self._answers.numbers

    @cached_property
    def _scores(self) -> Tensor | None:
        """(n, classes): where outputs are answers, what they are chosen by."""
        return joined_scores(self._outputs)

    @cached_property
    def _temperature(self) -> float:
        assert self._scores is not None
        return TEMPERATURE * half_sure(self._scores)

    @cached_property
    def _one_answer(self) -> bool:
        assert self._scores is not None
        _, counts = self._scores.argmax(1).unique(return_counts=True)
        inputs = len(self._scores)
        return inputs >= FEWEST and int(counts.max()) > ALIKE * inputs

    @property
    def _used(self) -> Sequence[Inputs]:
        return self.batches[: len(self._outputs)]

    @property
    def _inputs(self) -> int:
        return sum(len(out[0]) for out in self._outputs if out)

    def __call__(
        self,
        slim: nn.Module,
        made_from: nn.Module | None = None,
        by_batch: Tensor | None = None,
    ) -> Forecast:
        """What `slim` keeps of the original's accuracy.

        Where it can be run and no more, as a file of another runtime, `made_from` is the network
        that it was made from, whose BatchNorms can be asked. `by_batch` are the scores that `slim`
        gave in the second pass, where that ran already.
        """
        theirs = _Answers([], [])
        for batch in self._used:
            theirs.add(slim, batch)
        made = theirs.numbers
        pairs = list(zip(self._outputs, made, strict=True))
        if self._answers.boxes is not None and theirs.boxes is not None:
            agree, count = boxes.agreement(self._answers.boxes, theirs.boxes)
            error = float(torch.cat([relative_error(t, s) for t, s in pairs]).mean())
            images = len(theirs.boxes)
            return Forecast(agree, error, None, None, None, images, self.source, count)
        equal = [same for t, s in pairs if (same := equal_answers(t, s)) is not None]
        agreement = float(torch.cat(equal).double().mean()) if len(equal) == len(pairs) else None
        teacher, student = self._scores, joined_scores(made)
        if teacher is None or student is None or agreement is None:
            error = float(torch.cat([relative_error(t, s) for t, s in pairs]).mean())
            return Forecast(agreement, error, None, None, None, self._inputs, self.source)
        divergence = float(kl(teacher, student, self._temperature).mean())
        if self._one_answer:
            known = None, None, None, self._inputs, self.source
            return Forecast(agreement, divergence, *known, one_answer=True)
        alike = self._correlation(slim, student, made_from, by_batch)
        signs = Signs(agreement, divergence, alike)
        own = self.source == "own"
        kept, low, high = OWN.of_few(signs, self._inputs) if own else self.calibration(signs)
        return Forecast(agreement, divergence, kept, low, high, self._inputs, self.source)

    def _correlation(
        self,
        slim: nn.Module,
        scores: Tensor,
        made_from: nn.Module | None,
        by_batch: Tensor | None,
    ) -> float:
        """Of `slim`, which gave `scores`, with the original."""
        assert self._scores is not None
        if self.second_pass is None:
            return correlation(self._scores, scores)
        if made_from is None:
            return self._correlation_by_batch(self.second_pass, slim, by_batch)
        # What a runtime adds has nothing to do with what was lost before: correlations multiply.
        before = joined_scores(outputs(made_from, self._used, False))
        assert before is not None  # it gives what the file gives
        by_batch_before = self._correlation_by_batch(self.second_pass, made_from)
        return by_batch_before * correlation(before, scores)

    def _correlation_by_batch(
        self, second_pass: SecondPass, slim: nn.Module, scores: Tensor | None = None
    ) -> float:
        if slim is self.model:
            return 1.0
        teacher = second_pass.original.scores
        student = second_pass.run(slim).scores if scores is None else scores
        assert teacher is not None and student is not None  # as they were in use
        return correlation(teacher, student)


@dataclass
class _Answers:
    """What a network made of batches: numbers, and boxes where it is a detector."""

    numbers: list[list[Tensor]]
    boxes: list[boxes.Boxes] | None  # of every image
    size: int = 0  # numbers held

    def add(self, model: nn.Module, batch: Inputs) -> None:
        for given, out in answers(model, [batch]):
            self.numbers.append(numbers_in(out))
            self.size += sum(x.numel() for x in self.numbers[-1])
            found = boxes.find_boxes(out, given)
            self.boxes = None if found is None or self.boxes is None else self.boxes + found


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Bounds of a probability that came out as a fraction of so many trials (Wilson's)."""
    z = NINE_OF_TEN**2 / count
    middle = (fraction + z / 2) / (1 + z)
    half = math.sqrt(z * fraction * (1 - fraction) + z**2 / 4) / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)


def correlation(teacher: Tensor, student: Tensor) -> float:
    """Of scores (n, classes), less what every class and every example has on average."""
    t, s = (x - x.mean(1, keepdim=True) for x in (teacher, student))
    t, s = t - t.mean(0), s - s.mean(0)
    product = (t * s).sum() / (t.square().sum() * s.square().sum()).sqrt().clamp(min=1e-30)
    return float(product) if bool(product.isfinite()) else 0.0


def equal_answers(teacher: list[Tensor], student: list[Tensor]) -> Tensor | None:
    """Where both choose the same: of an example, of every token, or of every pixel.

    None where outputs are no scores to choose by.
    """
    if not teacher or not student or teacher[0].shape != student[0].shape:
        return None
    t, s = teacher[0], student[0]
    axis = 1 if t.dim() == 4 else -1  # (n, classes, height, width), else classes come last
    if t.dim() not in (2, 3, 4) or t.shape[axis] < 2 or (t.dim() == 2 and len(teacher) > 1):
        return None
    return (t.argmax(axis) == s.argmax(axis)).flatten()
