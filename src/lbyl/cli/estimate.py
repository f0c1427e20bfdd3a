"""`lbyl estimate`: how much would be lost, before deciding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import guarded
from lbyl.cli.job import follow, run_once
from lbyl.cli.screen import Screen, bold, plain, table
from lbyl.cli.setup import build, calibration_batches

if TYPE_CHECKING:
    from lbyl import Estimate

Methods = Annotated[
    list[str], typer.Option("--method", help="May be repeated.", autocompletion=o.complete_method)
]
Ratios = Annotated[
    list[float],
    typer.Option("--ratio", min=0.0, max=0.99, help="Share of filters that go; may be repeated."),
]
Full = Annotated[bool, typer.Option("--full", help="Every layer under every method, as text.")]
METHODS = ["none", "neuron-merging", "lbyl", "echo"]


@guarded
def estimate(
    model: o.Model,
    weights: o.Weights = None,
    ratio: Ratios = [0.1, 0.3, 0.5],  # noqa: B006 (typer shows and copies it)
    method: Methods = METHODS,
    criterion: o.Criterion = "l2",
    skip: o.Skip = None,
    modules: o.Modules = None,
    streams: o.Streams = False,
    calibration: o.Calibration = None,
    images: o.Images = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    full: Full = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Predict what every layer would lose at several ratios; nothing is changed or written."""
    screen = Screen(json, quiet)
    shape: dict[str, Any] = {"input_size": input_size, "classes": classes}
    hows, which = [o.parse_method(name) for name in method], o.parse_criterion(criterion, seed)
    network = build(screen, model, weights, device=device, threads=threads, **shape)
    choice = o.given(modules=modules or None, skip=skip or None)
    graph = follow(screen, network, streams=streams, **choice)
    batches = calibration_batches(screen, network, calibration)
    statistics = run_once(screen, network, graph, batches, seed, o.parse_images(images))
    with screen.stage("estimating"):
        import lbyl

        found = lbyl.estimate(
            network.model,
            network.example,
            tuple(ratio),
            methods=hows,
            criterion=which,
            statistics=statistics,
            graph=graph,
            seed=seed,
        )
    screen.data({"model": model, "criterion": criterion, **found.to_dict()})
    show(screen, model, found, full)


def show(screen: Screen, model: str, found: Estimate, full: bool) -> None:
    """Methods on the average of all layers, then the layers under the last method."""
    if full:
        screen.say(plain(str(found)))
        return
    ratios = sorted({row.ratio for row in found.rows})
    methods = list(dict.fromkeys(row.method for row in found.rows))
    units = list(dict.fromkeys(row.unit for row in found.rows))
    ware = {(r.unit, r.method, r.ratio): r.ware for r in found.rows}
    channels = {row.unit: row.channels for row in found.rows}
    heads = [f"{100 * ratio:.0f} % gone" for ratio in ratios]

    def mean(method: str, ratio: float) -> str:
        values = [ware[unit, method, ratio] for unit in units]
        return share(sum(values) / len(values))

    screen.say(
        f"\n{bold(model)}: part of a layer's output that would be lost (WARE), mean of "
        f"{len(units)} layers",
        table(["method", *heads], [[m, *(mean(m, r) for r in ratios)] for m in methods]),
    )
    last = methods[-1]
    rows = [[u, channels[u], *(share(ware[u, last, r]) for r in ratios)] for u in units]
    screen.say(f"[bold]layer by layer, restored by {last}[/]")
    screen.say(table(["layer", "filters", *heads], rows))


def share(value: float) -> str:
    """A share in per cent; a dash where it is not known."""
    return "–" if value != value else f"{100 * value:.1f} %"
