"""`lbyl images`: look at what the network is shown instead of data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import UsageError, guarded
from lbyl.cli.screen import Screen, bold

Target = Annotated[Path, typer.Argument(help="Picture to write.")]
Count = Annotated[int, typer.Option(min=1, max=4096, help="How many.")]
Shape = Annotated[str, typer.Option("--input-size", help="32, or a whole shape (1x28x28).")]


@guarded
def images(
    out: Target = Path("preview.png"),
    count: Count = 64,
    input_size: Shape = "32",
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Write a contact sheet of the procedural images that stand in for data."""
    screen = Screen(json, quiet)
    with screen.stage("drawing"):
        from lbyl.images import preview
        from lbyl.models import parse_input_shape

        given = parse_input_shape(input_size)
        shape = (3, *given * 2) if len(given) == 1 else given
        if len(shape) != 3:
            raise UsageError(f"--input-size {input_size}: write 32, or a shape such as 1x28x28")
        path = preview(out, count, shape, seed)
    screen.data({"out": str(path), "count": count, "shape": list(shape), "seed": seed})
    screen.say(f"wrote {bold(path)}: {count} images of {'×'.join(map(str, shape))}")
