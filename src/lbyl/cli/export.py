"""`lbyl export`: a network for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import UsageError, guarded
from lbyl.cli.screen import Screen, bold, human
from lbyl.cli.setup import build

Target = Annotated[Path, typer.Option(help="File to write: .onnx, or .pt2 for torch.export.")]
Tolerance = Annotated[float, typer.Option(help="Largest difference from PyTorch that is allowed.")]


@guarded
def export(
    model: o.Model,
    out: Target = Path("model.onnx"),
    weights: o.Weights = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    tolerance: Tolerance = 1e-3,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Write a network as ONNX, checked against PyTorch, or as a torch.export program."""
    screen = Screen(json, quiet)
    if out.suffix not in (".onnx", ".pt2"):
        raise UsageError(f"--out {out}: the name must end in .onnx or .pt2")
    network = build(screen, model, weights, input_size=input_size, classes=classes)
    found: dict[str, Any] = {"model": model, "out": str(out)}
    from lbyl.export import export_onnx, export_program

    if out.suffix == ".onnx":
        with screen.stage("exporting to ONNX and checking it"):
            found["error"] = export_onnx(network.model, network.example, out, tolerance)
    else:
        with screen.stage("exporting"):
            export_program(network.model, network.example, out)
    found["bytes"] = out.stat().st_size
    screen.data(found)
    checked = f", {found['error']:.1g} from PyTorch" if "error" in found else ""
    screen.say(f"wrote {bold(out)}: {human(found['bytes'])}B, any batch size{checked}")
