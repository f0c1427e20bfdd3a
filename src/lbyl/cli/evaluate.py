"""`lbyl evaluate`: accuracy, size and speed of a network."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import UsageError, guarded
from lbyl.cli.screen import Screen, bold, human
from lbyl.cli.setup import build, load_images, measure

Split = Annotated[str, typer.Option(help="test or train, inside directories.")]
Time = Annotated[bool, typer.Option("--time", help="Also time a pass of one image.")]


@guarded
def evaluate(
    model: o.Model,
    weights: o.Weights = None,
    data: o.Data = None,
    split: Split = "test",
    limit: o.Limit = None,
    batch_size: o.BatchSize = 100,
    time: Time = False,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    mean: o.Mean = None,
    std: o.Std = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Measure the accuracy of a network, original or compressed, on labelled images."""
    screen = Screen(json, quiet)
    if data is None and not time:
        raise UsageError("nothing to measure: give --data PATH, or --time")
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, classes=classes, device=device, threads=threads, **scale
    )
    found: dict[str, Any] = {"model": model}
    found["parameters"] = sum(p.numel() for p in network.model.parameters())
    lines = [f"parameters  {human(found['parameters'])}"]
    if data is not None:
        images = load_images(screen, network, data, split, limit)
        found["accuracy"] = measure(screen, network, images, batch_size=batch_size)
        found["images"] = len(images)
        lines.append(f"accuracy    [bold]{found['accuracy']:.2f} %[/] of {len(images)} images")
    if time:
        from lbyl.latency import compare

        place = next(network.model.parameters()).device
        with screen.stage("timing"):
            timing = compare({"it": network.model}, network.example, place, 30)["it"]
        found["seconds"], found["spread"] = timing.median, timing.spread
        lines.append(f"one image   {timing}")
    screen.data(found)
    screen.say(f"\n{bold(model)}", *lines)
