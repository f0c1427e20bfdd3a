"""`lbyl export`: a network for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from lbyl.cli import options as o
from lbyl.cli.errors import UsageError, guarded
from lbyl.cli.screen import Screen, bold
from lbyl.cli.setup import build, check_writable
from lbyl.export import export_onnx, export_program
from lbyl.torchkit.format import human

Target = Annotated[
    Path, o.output_option(metavar="FILE", help="File to write: .onnx, or .pt2 for torch.export.")
]
Tolerance = Annotated[
    float,
    o.output_option(metavar="NUMBER", help="Largest difference from PyTorch allowed, for ONNX."),
]


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
    check_writable(out)
    if out.suffix not in (".onnx", ".pt2"):
        raise UsageError(f"--out {out}: the name must end in .onnx or .pt2")
    network = build(screen, model, weights, input_size=input_size, classes=classes)
    written: dict[str, Any] = {"model": model, "out": str(out)}
    if out.suffix == ".onnx":
        with screen.stage("exporting to ONNX and checking it"):
            written["error"] = export_onnx(network.model, network.example, out, tolerance)
    else:
        with screen.stage("exporting"):
            export_program(network.model, network.example, out)
    written["bytes"] = out.stat().st_size
    screen.data(written)
    checked = f", {written['error']:.1g} from PyTorch" if "error" in written else ""
    screen.say(f"wrote {bold(out)}: {human(written['bytes'])}B, any batch size{checked}")
