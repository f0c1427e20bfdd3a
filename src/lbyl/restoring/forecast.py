"""How much accuracy a slim network keeps, told without data: agreement with the original.

Both networks run on inputs that nothing was fitted on. How often their answers are equal, and how
far they diverge, is measured; what that means for accuracy is a map that was calibrated once over
many networks, criteria, ratios and methods (`python -m benchmarks.forecast`), the same for every
network. The interval covers nine networks of ten that the map had not seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lbyl.restoring.divergence import half_sure, is_answer, kl, outputs, relative_error
from lbyl.torchkit.format import percent
from lbyl.torchkit.run import Inputs


@dataclass(frozen=True)
class Forecast:
    """What a slim network keeps, as far as that can be known without labels.

    `kept` is its accuracy over the original's, `low` and `high` bound it in nine cases of ten.
    They are None where outputs are not one vector of scores an example, as a classifier's are.
    """

    agreement: float | None  # fraction of equal answers
    divergence: float  # of answers at a fixed certainty; else the relative squared error
    kept: float | None
    low: float | None
    high: float | None
    inputs: int  # compared
    source: str  # "fresh" inputs, or the user's "own"

    def __str__(self) -> str:
        where = f"on {self.inputs} {self.source} inputs"
        if self.agreement is None:
            return f"outputs differ from the original's by {self.divergence:.3g} {where}"
        if self.kept is None:
            return f"{percent(self.agreement)} equal answers {where}"
        return (
            f"keeps about {percent(self.kept)} of the accuracy ({percent(self.low)} to "
            f"{percent(self.high)}): {percent(self.agreement)} equal answers {where}"
        )


@dataclass(frozen=True)
class Calibration:
    """From agreement and divergence to accuracy kept.

    With a the fraction of equal answers and d the divergence, the accuracy kept is 1 − σ(z), where
    z = w · (1, log odds of 1 − a, log d). `errors` says, for values of `kept`, how far below and
    above it the truth lies in nine cases of ten.
    """

    weights: tuple[float, float, float]
    errors: tuple[tuple[float, float, float], ...]  # kept, how far below, how far above; ascending

    def __call__(self, agreement: float, divergence: float) -> tuple[float, float, float]:
        """Accuracy kept, and the interval around it."""
        differing = min(max(1 - agreement, LEAST), 1 - LEAST)
        if not math.isfinite(divergence):
            return 0.0, 0.0, 0.0
        spread = math.log(min(max(divergence, LEAST**2), 1 / LEAST))
        odds = math.log(differing / (1 - differing))
        one, two, three = self.weights
        kept = 1 / (1 + math.exp(min(one + two * odds + three * spread, 50.0)))
        below, above = self._errors(kept)
        return kept, max(0.0, kept - below), min(1.0, kept + above)

    def _errors(self, kept: float) -> tuple[float, float]:
        """Between two points of the table the straight line."""
        points = self.errors
        for (x0, b0, a0), (x1, b1, a1) in itertools.pairwise(points):
            if kept <= x1:
                t = min(max((kept - x0) / (x1 - x0), 0.0), 1.0)
                return b0 + t * (b1 - b0), a0 + t * (a1 - a0)
        return points[-1][1:]


HELD = 1 << 25  # values of the original's outputs that are kept to compare with
LEAST = 1e-3  # answers that differ less often than this are not told apart

# Fitted by `python -m benchmarks.forecast fit`; docs/results/forecast.json has the rows.
FRESH = Calibration((0.0, 1.0, 0.0), ((0.0, 0.2, 0.2), (1.0, 0.1, 0.1)))
OWN = Calibration((0.0, 1.0, 0.0), ((0.0, 0.2, 0.2), (1.0, 0.1, 0.1)))


@dataclass
class Forecaster:
    """Compares networks with `model` on batches, which it runs on once."""

    model: nn.Module
    batches: Sequence[Inputs]
    source: str = "fresh"

    @cached_property
    def _outputs(self) -> list[list[Tensor]]:
        """The original's, as many as can be held: scores of every token of a text are large."""
        made: list[list[Tensor]] = []
        held = 0
        for batch in self.batches:
            if held < HELD:
                made += outputs(self.model, [batch], False)
                held += sum(x.numel() for x in made[-1])
        return made

    @cached_property
    def _temperature(self) -> float:
        return half_sure(torch.cat([out[0] for out in self._outputs]))

    @property
    def _inputs(self) -> int:
        return sum(len(out[0]) for out in self._outputs if out)

    def __call__(self, slim: nn.Module) -> Forecast:
        """What `slim` keeps of the original's accuracy."""
        teacher = self._outputs
        student = outputs(slim, self.batches[: len(teacher)], False)
        pairs = list(zip(teacher, student, strict=True))
        answers = all(is_answer(out) for out in teacher)
        if answers:
            apart = [kl(t[0], s[0], self._temperature) for t, s in pairs]
        else:
            apart = [relative_error(t, s) for t, s in pairs]
        equal = [same for t, s in pairs if (same := equal_answers(t, s)) is not None]
        agreement = float(torch.cat(equal).double().mean()) if len(equal) == len(pairs) else None
        divergence = float(torch.cat(apart).mean())
        kept, low, high = None, None, None
        if answers and agreement is not None:
            kept, low, high = (OWN if self.source == "own" else FRESH)(agreement, divergence)
        return Forecast(agreement, divergence, kept, low, high, self._inputs, self.source)


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
