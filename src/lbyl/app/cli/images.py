"""`lbyl images`: look at what the network is run on instead of data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded
from lbyl.app.cli.screen import Screen, bold
from lbyl.app.cli.setup import build, check_writable
from lbyl.app.sources import Network, parse_input_shape
from lbyl.inputs.batches import FreshInputs
from lbyl.inputs.images.preview import preview
from lbyl.inputs.images.procedural import procedural_images
from lbyl.runtime.format import counted

Target = Annotated[Path, typer.Argument(help="Picture to write.")]
Count = Annotated[int, o.images_option(metavar="N", min=1, max=4096, help="How many.")]
Shape = Annotated[
    str | None, o.images_option(metavar="SIZE", help="32, or a whole shape (1x28x28).")
]


@guarded
def images(
    out: Target = Path("preview.png"),
    count: Count = 64,
    input_size: Shape = None,
    model: o.ShownTo = None,
    weights: o.Weights = None,
    classes: o.Classes = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Write a contact sheet of the procedural images that replace data."""
    screen = Screen(json, quiet)
    check_writable(out)
    if model:
        network = build(screen, model, weights, input_size=input_size, classes=classes)
        with screen.stage("drawing"):
            drawn = of_network(network, count, seed)
    elif weights or classes:
        raise UsageError("--weights and --classes belong to a network: add --model")
    else:
        with screen.stage("drawing"):
            drawn = of_shape(input_size or "32", count, seed)
    path, shape = preview(out, count, images=drawn), list(drawn.shape[1:])
    screen.data({"out": str(path), "count": count, "shape": shape, "seed": seed})
    screen.say(f"wrote {bold(path)}: {counted(count, 'image')} of {'×'.join(map(str, shape))}")


def of_shape(size: str, count: int, seed: int) -> Tensor:
    """Images as they are painted: (count, C, H, W)."""
    given = parse_input_shape(size)
    shape = (3, *given * 2) if len(given) == 1 else given
    if len(shape) != 3:
        raise UsageError(f"--input-size {size}: write 32, or a shape such as 1x28x28")
    return procedural_images(count, shape, seed=seed)


def of_network(network: Network, count: int, seed: int) -> Tensor:
    """Images with the gains that match a network's first BatchNorm: (count, C, H, W)."""
    batches = FreshInputs(network.model, network.example, seed).collection(count).batches
    images = [tree_flatten(batch)[0][0] for batch in batches]
    if images[0].dim() != 4:
        raise UsageError("--model: this network takes no images that could be shown")
    return torch.cat(images)
