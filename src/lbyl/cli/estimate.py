"""`lbyl estimate`: how much would be lost, before deciding."""

from __future__ import annotations

from typing import Annotated, Any

from lbyl.cli import options as o
from lbyl.cli.errors import guarded
from lbyl.cli.parse import parse_criterion, parse_data, parse_method
from lbyl.cli.screen import Screen, bold, plain, table
from lbyl.cli.setup import build, prepare
from lbyl.planning.task import DEFAULT_CRITERION
from lbyl.report.fill import COMPARED
from lbyl.result import Estimate
from lbyl.torchkit.format import counted

Full = Annotated[bool, o.output_option("--full", help="Every layer under every method, as text.")]


@guarded
def estimate(
    model: o.Model,
    weights: o.Weights = None,
    ratio: o.Ratios = [0.1, 0.3, 0.5],  # noqa: B006 (typer shows and copies it)
    method: o.Methods = list(COMPARED),  # noqa: B006
    criterion: o.Criterion = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    residual: o.Residual = False,
    data: o.Data = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    mean: o.Mean = None,
    std: o.Std = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    full: Full = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Predict what every layer would lose at several ratios; nothing is written."""
    screen = Screen(json, quiet)
    chosen = [parse_method(name) for name in method]
    by = parse_criterion(criterion or DEFAULT_CRITERION, seed)
    assert by is not None
    source = parse_data(data)
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, classes=classes, device=device, threads=threads, **scale
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
        predicted = prepared.estimate(tuple(ratio), methods=chosen, criterion=by)
    screen.data({"model": model, "criterion": by.name, **predicted.to_dict()})
    show(screen, model, predicted, full)


def show(screen: Screen, model: str, predicted: Estimate, full: bool) -> None:
    """Methods on the average of all layers, then the layers under the last method."""
    if full:
        screen.say(plain(str(predicted)))
        return
    ratios = sorted({row.ratio for row in predicted.rows})
    methods = list(dict.fromkeys(row.method for row in predicted.rows))
    units = list(dict.fromkeys(row.unit for row in predicted.rows))
    ware = {(r.unit, r.method, r.ratio): r.ware for r in predicted.rows}
    channels = {row.unit: row.channels for row in predicted.rows}
    heads = [f"{100 * ratio:.0f} % pruned" for ratio in ratios]

    def mean(method: str, ratio: float) -> str:
        values = [ware[unit, method, ratio] for unit in units]
        return percent(sum(values) / max(1, len(values)))

    screen.say(
        f"\n{bold(model)}: part of a layer's output that would be lost (WARE, on "
        f"{predicted.source} statistics), mean of {counted(len(units), 'layer')}",
        table(["method", *heads], [[m, *(mean(m, r) for r in ratios)] for m in methods]),
    )
    if not methods:
        return
    last = methods[-1]
    rows = [[u, channels[u], *(percent(ware[u, last, r]) for r in ratios)] for u in units]
    screen.say(f"[bold]layer by layer, restored by {last}[/]")
    screen.say(table(["layer", "channels", *heads], rows))


def percent(fraction: float) -> str:
    """A fraction in per cent; a dash where it is not known."""
    return "–" if fraction != fraction else f"{100 * fraction:.1f} %"
