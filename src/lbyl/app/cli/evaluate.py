"""`lbyl evaluate`: accuracy, size and speed of a network."""

from __future__ import annotations

from typing import Annotated, Any

from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded
from lbyl.app.cli.parse import check_limit
from lbyl.app.cli.screen import Screen, bold
from lbyl.app.cli.setup import build, load_images, score
from lbyl.latency import compare
from lbyl.runtime.format import human
from lbyl.runtime.run import device_of

Split = Annotated[str, o.images_option(metavar="NAME", help="test or train, inside directories.")]
Time = Annotated[bool, o.output_option("--time", help="Also time a pass of one image.")]
REPEATS = 30


@guarded
def evaluate(
    model: o.Model,
    weights: o.Weights = None,
    test: o.Test = None,
    split: Split = "test",
    limit: o.Limit = None,
    batch_size: o.BatchSize = 100,
    time: Time = False,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    task: o.Task = None,
    mean: o.Mean = None,
    std: o.Std = None,
    device: o.Device = "auto",
    threads: o.Threads = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Measure the accuracy of a network, original or compressed, on labelled images."""
    screen = Screen(json, quiet)
    if test is None and not time:
        raise UsageError("nothing to measure: give --test PATH, or --time")
    check_limit(test, limit)
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, task=task, classes=classes, device=device, threads=threads, **scale
    )
    measured: dict[str, Any] = {"model": model}
    measured["parameters"] = sum(p.numel() for p in network.model.parameters())
    lines = [f"parameters  {human(measured['parameters'])}"]
    if test is not None:
        images = load_images(screen, network, test, split, limit)
        found = score(screen, network, images, batch_size=batch_size)
        low, high = found.interval
        measured |= {"accuracy": found.accuracy, "top_5": found.top_5, "images": found.images}
        measured["interval"] = [low, high]
        lines.append(
            f"accuracy    [bold]{found.accuracy:.2f} %[/] of {found.images} images "
            f"[dim](19 in 20: {low:.1f} to {high:.1f} %)[/]"
        )
        if found.top_5 is not None:
            lines.append(f"within 5    {found.top_5:.2f} %")
    if time:
        with screen.stage("timing"):
            models = {model: network.model}
            timing = compare(models, network.example, device_of(network.model), REPEATS)[model]
        measured["seconds"], measured["runs"] = timing.median, list(timing.runs)
        lines.append(f"one image   {timing}")
    screen.data(measured)
    screen.say(f"\n{bold(model)}", *lines)
