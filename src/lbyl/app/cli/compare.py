"""`lbyl compare`: several methods and criteria side by side."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from lbyl import Prepared, Result
from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded
from lbyl.app.cli.parse import (
    check_limit,
    check_source_used,
    parse_criterion,
    parse_data,
    parse_method,
    parse_task,
)
from lbyl.app.cli.screen import Screen, bold, plain, table
from lbyl.app.cli.setup import Accuracies, build, prepare
from lbyl.app.report.fill import COMPARED, common_statistics, consumer_errors
from lbyl.methods import Method
from lbyl.planning.criteria import Criterion
from lbyl.planning.task import DEFAULT_CRITERION, Task
from lbyl.refining.distil import Refinement, Steps
from lbyl.runtime.format import bounded, human
from lbyl.statistics.moments import Statistics


@guarded
def compare(
    model: o.Model,
    weights: o.Weights = None,
    ratio: o.Ratios = [0.3],  # noqa: B006 (typer shows and copies it)
    method: o.Methods = list(COMPARED),  # noqa: B006
    criterion: o.Criteria = None,
    refine: o.Refine = 0,
    include: o.Include = None,
    exclude: o.Exclude = None,
    residual: o.Residual = False,
    multiple_of: o.MultipleOf = None,
    data: o.Data = None,
    test: o.Test = None,
    limit: o.Limit = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    task: o.Task = None,
    mean: o.Mean = None,
    std: o.Std = None,
    device: o.Device = "auto",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Try several methods, criteria and ratios on one network, side by side."""
    screen = Screen(json, quiet)
    trials = all_trials(ratio, criterion, method, multiple_of, seed)
    source = parse_data(data)
    check_source_used(source, [trial.task for trial in trials], refine)
    check_limit(test, limit)
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    machine: dict[str, Any] = {"device": device, "threads": threads}
    network = build(screen, model, weights, task=task, classes=classes, **machine, **scale)
    accuracy = Accuracies.on(screen, network, test, limit)
    where: dict[str, Any] = {"include": include, "exclude": exclude, "residual": residual}
    prepared = prepare(screen, network, source=source, seed=seed, **where)
    accuracy.measure("original", "measuring accuracy")
    rows = compared(screen, prepared, trials, refine, accuracy)
    original = accuracy.found.get("original")
    document = {"model": model, "original": {"accuracy": original}, "refine": refine}
    screen.data(document | {"rows": rows})
    show(screen, model, original, rows)


def compared(
    screen: Screen, prepared: Prepared, trials: list[Trial], refine: Steps, accuracy: Accuracies
) -> list[dict[str, Any]]:
    """A row for every trial, all on the same statistics and the same images."""
    with screen.stage("collecting statistics"):
        statistics = common_statistics(prepared, [trial.task for trial in trials])
    quiet = replace(accuracy, screen=Screen(quiet=True))
    rows = []
    for trial in trials:
        with screen.stage(str(trial)):
            start = time.perf_counter()
            result = trial.run(prepared, refine)
            seconds = time.perf_counter() - start
            error = mean_error(prepared, trial.method, result, statistics)
        quiet.measure("slim", "", result.model)
        rows.append(as_row(trial, result, quiet.found.get("slim"), error) | {"seconds": seconds})
    return rows


@dataclass(frozen=True)
class Trial:
    """One compression of several."""

    ratio: float
    criterion: Criterion | None  # None: the method chooses
    method: Method
    multiple_of: int | None

    @property
    def task(self) -> Task:
        return parse_task(self.ratio, self.criterion, self.method, self.multiple_of)

    def run(self, prepared: Prepared, refine: Steps) -> Result:
        return prepared.compress(
            self.ratio,
            criterion=self.criterion,
            method=self.method,
            multiple_of=self.multiple_of,
            refine=refine,
        )

    def __str__(self) -> str:
        by = "its own choice" if self.criterion is None else self.criterion.name
        return f"{self.method.name} after {by} at {self.ratio:g}"


def all_trials(
    ratios: list[float],
    criteria: list[str] | None,
    methods: list[str],
    multiple_of: int | None,
    seed: int,
) -> list[Trial]:
    """Every ratio, criterion and method; what chooses its channels itself comes once a ratio."""
    resolved = [parse_method(name) for name in dict.fromkeys(methods)]
    if criteria and all(method.chooses for method in resolved):
        names = ", ".join(method.name for method in resolved)
        raise UsageError(f"{names} choose their channels themselves: leave --criterion out")
    given = dict.fromkeys(criteria or [DEFAULT_CRITERION])
    return [
        Trial(ratio, None if method.chooses else criterion, method, multiple_of)
        for ratio in ratios
        for index, criterion in enumerate(parse_criterion(name, seed) for name in given)
        for method in resolved
        if index == 0 or not method.chooses
    ]


def as_row(
    trial: Trial, result: Result, accuracy: float | None, error: float | None
) -> dict[str, Any]:
    """What is told of one compression."""
    return {
        "ratio": trial.ratio,
        "criterion": None if result.criterion is None else result.criterion["name"],
        "method": trial.method.name,
        "story": result.story,
        "refinement": None if result.refinement is None else asdict(result.refinement),
        "parameters": result.after.parameters,
        "macs": result.after.macs,
        "accuracy": accuracy,
        "forecast": None if result.forecast is None else asdict(result.forecast),
        "error": error,
    }


def mean_error(
    prepared: Prepared, method: Method, result: Result, statistics: Statistics | None
) -> float | None:
    """The error at the consumers, averaged over the pruned layers."""
    errors = [row.error for row in result.rows if row.kept < row.channels]
    if statistics is not None and result.data != statistics.source:  # on none, or on others
        errors = list(consumer_errors(prepared, result.plan, method, statistics).values())
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def show(screen: Screen, model: str, original: float | None, rows: list[dict[str, Any]]) -> None:
    """One table; the best of each ratio would be a judgement, so only the order is ours."""
    measured = original is not None
    several = len({row["criterion"] for row in rows}) > 1
    columns = ["method", *(["criterion"] if several else []), "ratio", "keeps about"]
    columns += ["accuracy"] if measured else []
    columns += ["parameters", "MACs", "error", "time"]
    lines = []
    for row in rows:
        line = [row["method"], *([row["criterion"] or "its own"] if several else [])]
        told = row["forecast"] or {}
        line += [f"{row['ratio']:g}", bounded(*(told.get(key) for key in ("kept", "low", "high")))]
        line += [f"{row['accuracy']:.2f} %"] if measured else []
        line += [human(row["parameters"]), human(row["macs"])]
        line += ["–" if row["error"] is None else f"{row['error']:.3f}"]
        lines.append([*line, f"{row['seconds']:.2f} s"])
    base = f": the original has {original:.2f} %" if measured else ""
    screen.say(f"\n{bold(model)}{base}", table(columns, lines))
    for row in rows:
        if row["refinement"] is not None:
            refinement = Refinement(**row["refinement"])
            screen.say(f"[dim]{plain(row['method'])} at {row['ratio']:g}: {refinement}[/]")
    if not measured:
        screen.say(
            "[dim]keeps about: accuracy forecast to be kept, and its bounds; error: of the "
            "consumers' outputs; with --test accuracy is measured[/]"
        )
