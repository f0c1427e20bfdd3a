"""How much accuracy a slim network keeps, told without data: agreement with the original.

Both networks run on held-out synthetic inputs, which nothing was fitted on. The fraction of equal
answers is counted, and one curve, fitted once on networks with labelled images, says what that
means for accuracy. Its constants and bounds are in `calibration.json` beside this file, written by
`python -m benchmarks.forecast_fit`; docs/forecast.md says where they fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from lbyl.runtime.answers import half_sure, joined_scores, kl, numbers_in, relative_error
from lbyl.runtime.format import percent
from lbyl.runtime.run import Inputs
from lbyl.scoring import boxes
from lbyl.scoring.compare import answers

HALF = 0.5  # of the accuracy: a network that keeps less at best is lost


@dataclass(frozen=True)
class Forecast:
    """What a slim network keeps, as far as that can be known without labels.

    `kept` is its accuracy over the original's. `low` is what it keeps at least and `high` at most,
    as far as `networks` others tell. They are None where outputs are not one vector of scores an
    example, as a classifier's are, and where the original gives `one_answer` to nearly all inputs:
    of the others nothing can be told. Of a detector `boxes` is how many the original found, and
    `agreement` the share of them and of the slim network's that the other found too.
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
    networks: int = 0  # that the map was fitted on

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
            f"keeps about {percent(self.kept)} of the accuracy, at least {percent(self.low)}: "
            f"{percent(self.agreement)} equal answers {where}"
        )

    @property
    def lost(self) -> bool:
        """Whether less than half of the accuracy is kept, at best."""
        return self.high is not None and self.high < HALF

    @property
    def standing(self) -> str:
        """How many networks stand behind the bounds, and where they fail."""
        if self.low is None:
            return "" if self.one_answer else "nothing is known of the accuracy that is kept"
        if not self.networks:
            return ""
        where = "networks thin by design lose more than they say"
        if self.low < HALF:
            where = "below half nothing is promised, for the map was not fitted there"
        return (
            f"at most {percent(self.high)}; the bounds are of {self.networks} networks, each left "
            f"out in turn: {where}"
        )


def boxes_agree(agreement: float | None) -> str:
    """The agreement of two detectors in words."""
    if agreement is None:
        return "neither network finds a box"
    return f"{percent(agreement)} of boxes agree in class and place"


@dataclass(frozen=True)
class Calibration:
    """From the fraction of equal answers to accuracy kept: σ(constant + slope · logit(agreement)).

    The bounds lie `below` and `above` the curve on the logit scale: the second largest of the
    errors of `networks`, each forecast by a curve fitted on the others.
    """

    constant: float
    slope: float
    below: float
    above: float
    networks: int

    def __call__(self, agreement: float, inputs: int) -> tuple[float, float, float]:
        """Accuracy kept and its bounds, wider by what chance does to so many answers."""
        middle = self._at(agreement)
        least, most = (self._at(bound) for bound in wilson(agreement, inputs))
        low = middle - math.hypot(self.below, middle - least)
        high = middle + math.hypot(self.above, most - middle)
        return logistic(middle), logistic(low), logistic(high)

    def _at(self, agreement: float) -> float:
        return self.constant + self.slope * logit(agreement)

    @property
    def most(self) -> float:
        """The most that can be promised: `low` where all of very many answers are equal."""
        return self(1.0, MANY)[1]

    def inputs_for(self, kept: float) -> int:
        """As many inputs as pay where `kept` is to be promised.

        They are doubled until chance lowers `low` by no more than `PAYS`.
        """
        agreement = logistic((logit(kept) + self.below - self.constant) / self.slope)
        sure = self(agreement, MANY)[1]
        count = FEWEST
        while sure - self(agreement, count)[1] > PAYS:
            count *= 2
        return count


def logit(fraction: float) -> float:
    """log(p / (1 − p)), of a fraction that is kept from the ends."""
    p = min(max(fraction, LEAST), 1 - LEAST)
    return math.log(p / (1 - p))


def logistic(z: float) -> float:
    """The fraction whose log odds are z."""
    return 1 / (1 + math.exp(-z)) if z > -50 else 0.0


NINE_OF_TEN = 1.645  # standard deviations either way

HELD = 1 << 25  # values of the original's outputs that are kept to compare with
ALIKE = 0.95  # of the inputs, if one answer is given to more of them, it tells of no other,
FEWEST = 32  # unless they are so few that this is chance
LEAST = 0.01  # from the ends: test images, some hundreds to thousands, tell no more
TEMPERATURE = 2.0  # times the one at which the original is half sure
PAYS = 0.005  # of the accuracy: more inputs are compared where `low` gains more by them
MANY = 1 << 40  # inputs, of which chance is nothing

VERSION = 1


def read_calibrations(path: Path) -> dict[str, Calibration]:
    """The maps of a file by their names."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["version"] != VERSION:
        raise ValueError(f"{path} has version {document['version']}, not {VERSION}")
    return {name: Calibration(**fields) for name, fields in document["maps"].items()}


CALIBRATIONS: Mapping[str, Calibration] = read_calibrations(
    Path(__file__).with_name("calibration.json")
)
"""Of "fresh" inputs, of a user's "own", and of fresh ones for "folded" networks: convolutional ones
that no norm tells anything about (`Graph.forgot`), which synthetic inputs suit far less."""


@dataclass
class Forecaster:
    """Compares networks with `model` on batches, which it runs on once."""

    model: nn.Module
    batches: Sequence[Inputs]
    source: str = "fresh"
    calibration: Calibration = CALIBRATIONS["fresh"]

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

    def __call__(self, slim: nn.Module) -> Forecast:
        """What `slim`, a network or a file of another runtime, keeps of the original's accuracy."""
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
        told = 0.0, 0.0, 0.0
        if math.isfinite(divergence):
            told = self.calibration(agreement, self._inputs)
        behind = self.calibration.networks
        return Forecast(agreement, divergence, *told, self._inputs, self.source, networks=behind)


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
