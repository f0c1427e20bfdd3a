"""What a sweep goes over: points, each one compression, and what all of them have in common."""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lbyl.errors import LbylError
from lbyl.methods import registry as methods
from lbyl.planning.budget import Budget
from lbyl.planning.criteria import Criterion
from lbyl.planning.criteria import registry as criteria
from lbyl.planning.ratio import Ratio
from lbyl.planning.task import Task
from lbyl.refining.distil import Steps

RATIO = "ratio"  # the other kinds of amounts are those of a budget


@dataclass(frozen=True)
class Subject:
    """A network by name, as `lbyl compress` takes it."""

    model: str
    weights: str | None = None


@dataclass(frozen=True)
class Setting:
    """What all points of a sweep have in common."""

    input_shape: tuple[int, ...] | None = None
    classes: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    data: str | int | None = None  # a word of `lbyl.api.SOURCES`, or a number of images
    test: str | None = None
    limit: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    residual: bool = False
    multiple_of: int | None = None
    refine: Steps = 0
    time: bool = False  # also measure how long a pass takes
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class Point:
    """One compression."""

    subject: Subject
    kind: str  # "ratio", or the field of a `Budget`
    amount: float
    criterion: str | None  # None: as suits the method
    method: str
    seed: int = 0

    @property
    def chosen(self) -> Criterion | None:
        """The criterion as an object; a random one draws by the seed."""
        if self.criterion is None:
            return None
        criterion = criteria.resolve(self.criterion)
        if hasattr(criterion, "seed"):
            return criteria.resolve({"name": self.criterion, "seed": self.seed})
        return criterion

    @property
    def pruned(self) -> Ratio | Budget:
        """The amount as `lbyl.compress` takes it."""
        budget: dict[str, Any] = {self.kind: self.amount}
        return self.amount if self.kind == RATIO else Budget(**budget)

    def task(self, multiple_of: int | None) -> Task:
        """The compression with every name resolved."""
        return Task.of(self.pruned, self.chosen, methods.resolve(self.method), multiple_of)

    def key(self, setting: Setting) -> str:
        """What tells this row from all others, whichever machine computes it."""
        same = {k: v for k, v in asdict(setting).items() if k not in ("device", "threads")}
        return fingerprint({"point": asdict(self), "setting": same})

    def command(self, setting: Setting) -> str:
        """The command line that makes this network and keeps it."""
        words = ["lbyl", "compress", self.subject.model]
        options: list[tuple[str, Any]] = [
            ("weights", self.subject.weights),
            (self.kind.replace("_", "-"), f"{self.amount:g}"),
            ("criterion", self.criterion),
            ("method", self.method),
            ("seed", self.seed or None),
            ("data", setting.data),
            ("refine", setting.refine or None),
            ("multiple-of", setting.multiple_of),
            ("classes", setting.classes),
            ("input-size", _joined(setting.input_shape, "x")),
            ("mean", _joined(setting.mean, ",")),
            ("std", _joined(setting.std, ",")),
            *(("include", pattern) for pattern in setting.include),
            *(("exclude", pattern) for pattern in setting.exclude),
            ("out", "slim"),
        ]
        for name, value in options:
            words += [] if value is None else [f"--{name}", str(value)]
        return shlex.join([*words, "--residual"] if setting.residual else words)

    def __str__(self) -> str:
        by = f" after {self.criterion}" if self.criterion else ""
        return f"{self.subject.model}: {self.method}{by}, {self.kind} {self.amount:g}"


def _joined(values: Sequence[float] | None, separator: str) -> str | None:
    return None if values is None else separator.join(f"{value:g}" for value in values)


def fingerprint(value: Any) -> str:
    """A short name for plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def points(
    subjects: Sequence[Subject],
    amounts: Sequence[tuple[str, float]],
    criteria: Sequence[str | None],
    methods_named: Sequence[str],
    seeds: Sequence[int],
    multiple_of: int | None = None,
) -> list[Point]:
    """Every combination, each once; what contradicts itself is refused before anything runs.

    A method that chooses its channels itself comes once for all criteria, by its own choice.
    """
    made: dict[Point, None] = {}
    for subject, seed, (kind, amount), by, method in itertools.product(
        subjects, seeds, amounts, criteria, methods_named
    ):
        chooses = methods.resolve(method).chooses
        point = Point(subject, kind, amount, None if chooses else by, method, seed)
        point.task(multiple_of)
        made[point] = None
    if not made:
        raise LbylError("a sweep of nothing: name a network, an amount and a method")
    return list(made)
