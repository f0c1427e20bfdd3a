"""`lbyl estimate`: how much would be kept, before deciding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded
from lbyl.app.cli.parse import parse_criterion, parse_data, parse_method, typed
from lbyl.app.cli.screen import Screen, bold, plain, table
from lbyl.app.cli.setup import build, prepare
from lbyl.app.sweep.recommend import KEEP, recommend
from lbyl.result import Estimate, EstimatePoint
from lbyl.runtime.format import percent

Full = Annotated[bool, o.output_option("--full", help="Also the error of every layer.")]


@guarded
def estimate(
    model: o.Model,
    weights: o.Weights = None,
    ratio: o.Ratios = [0.1, 0.2, 0.3, 0.4, 0.5],  # noqa: B006 (typer shows and copies it)
    method: o.Methods = ["echo"],  # noqa: B006
    criterion: o.Criterion = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    residual: o.Residual = False,
    data: o.Data = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    task: o.Task = None,
    mean: o.Mean = None,
    std: o.Std = None,
    device: o.Device = "auto",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    full: Full = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Forecast how much accuracy is kept at several ratios; nothing is written."""
    screen = Screen(json, quiet)
    chosen = [parse_method(name) for name in method]
    by = parse_criterion(criterion, seed)
    if by is not None and all(method.chooses for method in chosen):
        raise UsageError("these methods choose their channels themselves: leave --criterion out")
    source = parse_data(data)
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, task=task, classes=classes, device=device, threads=threads, **scale
    )
    prepared = prepare(
        screen,
        network,
        source=source,
        include=include,
        exclude=exclude,
        residual=residual,
        seed=seed,
    )
    with screen.stage("estimating"):
        predicted = prepared.estimate(tuple(sorted(set(ratio))), methods=chosen, criterion=by)
    screen.data({"model": model, "criterion": by and by.name, **predicted.to_dict()})
    given: dict[str, Any] = {"weights": weights, "criterion": criterion, "data": data, **scale}
    where: dict[str, Any] = {"include": include, "exclude": exclude, "residual": residual}
    network_is: dict[str, Any] = {"classes": classes, "task": task}
    command = typed("compress", model, keep=f"{KEEP:g}", **given, **network_is, **where)
    show(screen, model, predicted, full, command)


def show(screen: Screen, model: str, predicted: Estimate, full: bool, command: str) -> None:
    """What is kept at every ratio; then where the error is, layer by layer."""
    several = len({point.method for point in predicted.points}) > 1
    columns = ["pruned", *(["method"] if several else []), "keeps about", "interval"]
    detects = any(p.forecast is not None and p.forecast.boxes is not None for p in predicted.points)
    columns += ["boxes agree" if detects else "equal answers", "MACs", "parameters"]
    rows = [_row(point, several) for point in predicted.points]
    screen.say(f"\n{bold(model)}: accuracy forecast to be kept, without data", table(columns, rows))
    if any(p.forecast is not None and p.forecast.kept is not None for p in predicted.points):
        screen.say(
            "[dim]the interval is that of the networks behind the forecast, each left out in turn; "
            "MACs and parameters are what is left of them[/]"
        )
        screen.say(*_advice(command, predicted.points))
    if full:
        for name in dict.fromkeys(point.method for point in predicted.points):
            layers(screen, name, [p for p in predicted.points if p.method == name])
    else:
        screen.say("[dim]--full shows where the error is, layer by layer[/]")


def _advice(command: str, points: Sequence[EstimatePoint]) -> list[str]:
    """The ratio to pick, with the command."""
    kept = [None if p.forecast is None else p.forecast.low for p in points]
    index = recommend([(p.macs, k) for p, k in zip(points, kept)])
    if index is None:
        return [f"none of these keeps {percent(KEEP)} at least: prune less, or --refine"]
    point = points[index]
    return [
        f"recommended: {bold(f'--ratio {point.ratio:g} --method {point.method}')}, the smallest of "
        f"these that keeps {percent(KEEP)} at least; between them:",
        f"    [cyan]{plain(f'{command} --method {point.method}')}[/]",
    ]


def _row(point: EstimatePoint, several: bool) -> list[str]:
    told = point.forecast
    row = [f"{100 * point.ratio:.0f} %", *([point.method] if several else [])]
    if told is None or told.kept is None:
        row += ["–", "–"]
    else:
        row += [percent(told.kept), f"{percent(told.low)} to {percent(told.high)}"]
    equal = None if told is None else told.agreement
    return [*row, percent(equal), percent(point.macs), percent(point.parameters)]


def layers(screen: Screen, method: str, points: Sequence[EstimatePoint]) -> None:
    """The error of what a layer's consumers compute, at every ratio."""
    units = list(dict.fromkeys(unit for point in points for unit in point.errors))
    heads = [f"{100 * point.ratio:.0f} % pruned" for point in points]
    rows = [[unit, *(percent(point.errors.get(unit)) for point in points)] for unit in units]
    screen.say(f"[bold]error at the consumers of each layer, restored by {plain(method)}[/]")
    screen.say(table(["layer", *heads], rows))
