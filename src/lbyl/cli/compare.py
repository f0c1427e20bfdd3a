"""`lbyl compare`: several methods and criteria side by side."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import guarded
from lbyl.cli.job import follow, run_once
from lbyl.cli.screen import Screen, bold, human, some, table
from lbyl.cli.setup import as_classifier, build, calibration_batches, load_images, measure

if TYPE_CHECKING:
    from lbyl import Graph, Result, Statistics
    from lbyl.data import ImageSet
    from lbyl.models import Network

Methods = Annotated[
    list[str],
    typer.Option("--method", help="May be repeated.", autocompletion=o.complete_method),
]
Criteria = Annotated[
    list[str],
    typer.Option("--criterion", help="May be repeated.", autocompletion=o.complete_criterion),
]
Ratios = Annotated[
    list[float],
    typer.Option("--ratio", min=0.0, max=0.99, help="Share of filters that go; may be repeated."),
]
METHODS = ["none", "neuron-merging", "lbyl", "echo"]


@guarded
def compare(
    model: o.Model,
    weights: o.Weights = None,
    ratio: Ratios = [0.3],  # noqa: B006 (typer shows and copies it)
    method: Methods = METHODS,
    criterion: Criteria = ["l2"],  # noqa: B006
    refine: o.Refine = 0,
    skip: o.Skip = None,
    modules: o.Modules = None,
    streams: o.Streams = False,
    round_to: o.RoundTo = None,
    data: o.Data = None,
    limit: o.Limit = None,
    calibration: o.Calibration = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    mean: o.Mean = None,
    std: o.Std = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Try several methods, criteria and ratios on one network and put them side by side."""
    screen = Screen(json, quiet)
    chosen = [o.parse_method(name) for name in method]
    rules = [o.parse_criterion(name, seed) for name in criterion]
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, classes=classes, device=device, threads=threads, **scale
    )
    images = load_images(screen, network, data, limit=limit) if data else None
    choice = o.given(modules=modules or None, skip=skip or None)
    graph = follow(screen, network, streams=streams, **choice)
    statistics, batches = None, None
    running = any(runs(m) for m in chosen) or any(c.needs_statistics for c in rules)
    if running or refine:
        batches = calibration_batches(screen, network, calibration)
    if running:
        statistics = run_once(screen, network, graph, batches, seed)
    original = measure(screen, network, images) if images is not None else None
    again = batches if refine else None  # for all else the statistics say it
    fixed = {"calibration": again, "round_to": round_to, "refine": refine, "seed": seed}
    bench = Bench(network, graph, statistics, images, fixed)
    rows = bench.run(screen, list(itertools.product(ratio, rules, chosen)))
    screen.data(
        {"model": model, "original": {"accuracy": original}, "refine": refine, "rows": rows}
    )
    show(screen, model, original, rows)
    if refine:
        screen.say(f"[dim]each restored, then refined by {some(refine, 'step')} of gradient[/]")


def runs(method: Any) -> bool:
    """Whether a method needs the network to be run on images."""
    wanted = method.needs_statistics or method.default_repair != "none"
    return wanted and not method.analytic


class Bench:
    """One network, of which everything but the choice stays the same."""

    def __init__(
        self,
        network: Network,
        graph: Graph,
        statistics: Statistics | None,
        images: ImageSet | None,
        fixed: dict[str, Any],
    ) -> None:
        self.network, self.graph, self.statistics = network, graph, statistics
        self.images, self.fixed = images, fixed

    def run(self, screen: Screen, trials: list[tuple[float, Any, Any]]) -> list[dict[str, Any]]:
        """A row for every ratio, criterion and method."""
        rows = []
        with screen.stage("comparing") as tick:
            for place, (ratio, criterion, method) in enumerate(trials):
                name = f"{method.name} after {criterion.name} at {ratio:g}"
                tick.named(name, place, len(trials))
                rows.append(self._row(ratio, criterion, method))
        return rows

    def _row(self, ratio: float, criterion: Any, method: Any) -> dict[str, Any]:
        import lbyl
        from lbyl import data

        start = time.perf_counter()
        result = lbyl.compress(
            self.network.model,
            self.network.example,
            ratio,
            criterion=criterion,
            method=method,
            graph=self.graph,
            statistics=None if method.analytic else self.statistics,
            **self.fixed,
        )
        seconds = time.perf_counter() - start
        network, accuracy = self.network, None
        if self.images is not None:
            slim = as_classifier(network, result.model)
            accuracy = data.accuracy(
                slim, self.images, network.mean, network.std, 100, flatten=network.flatten
            )
        return {
            "ratio": ratio,
            "criterion": criterion.name,
            "method": method.name,
            "parameters": result.after.parameters,
            "macs": result.after.macs,
            "accuracy": accuracy,
            **mean_errors(result),
            "seconds": seconds,
        }


def mean_errors(result: Result) -> dict[str, float]:
    """RE, BE and ‖s‖, averaged over the layers that lost something."""
    pruned = [row for row in result.rows if row.kept < row.channels]
    count = max(1, len(pruned))
    keys = ("residual", "bias", "norm")
    return {key: sum(getattr(row, key) for row in pruned) / count for key in keys}


def show(screen: Screen, model: str, original: float | None, rows: list[dict[str, Any]]) -> None:
    """One table; the best of each ratio would be a judgement, so only the order is ours."""
    known = original is not None
    columns = ["method", "criterion", "ratio", "parameters", "MACs"]
    columns += ["accuracy"] if known else []
    columns += ["RE", "BE", "‖s‖", "time"]
    lines = []
    for row in rows:
        line = [row["method"], row["criterion"], f"{row['ratio']:g}"]
        line += [human(row["parameters"]), human(row["macs"])]
        line += [f"{row['accuracy']:.2f} %"] if known else []
        line += [f"{row[key]:.3f}" for key in ("residual", "bias", "norm")]
        lines.append([*line, f"{row['seconds']:.2f} s"])
    base = f": the original has {original:.2f} %" if known else ""
    screen.say(f"\n{bold(model)}{base}", table(columns, lines))
    if not known:
        screen.say("[dim]RE and BE are distances of weights; with --data accuracy is measured[/]")
