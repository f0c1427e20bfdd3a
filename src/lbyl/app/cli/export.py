"""`lbyl export`: a network for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded
from lbyl.app.cli.files import DEPLOYMENT, before, origin
from lbyl.app.cli.screen import Screen, bold, table
from lbyl.app.cli.setup import build, check_writable, prepare
from lbyl.app.deploy import HEADINGS, quantise_onnx, step_texts, table_of_steps
from lbyl.app.export import (
    check_executorch,
    check_onnx,
    check_openvino,
    export_executorch,
    export_onnx,
    export_openvino,
    export_program,
)
from lbyl.app.sources import Network
from lbyl.runtime.format import human
from lbyl.runtime.notes import noting
from lbyl.runtime.session import own_randomness

# By the end of a file's name: what must be installed, and who writes it and compares it.
FORMATS = {
    ".onnx": check_onnx,
    ".pt2": lambda: None,
    ".pte": check_executorch,
    ".xml": check_openvino,
}
CHECKED = {".onnx": export_onnx, ".pte": export_executorch, ".xml": export_openvino}
OUT = "File to write: .onnx, .pt2 for torch.export, .pte for ExecuTorch, .xml for OpenVINO."
Out = Annotated[Path, o.output_option(metavar="FILE", help=OUT)]
Tolerance = Annotated[
    float,
    o.output_option(metavar="NUMBER", help="Largest difference from PyTorch allowed."),
]
INT8 = "Also write FILE.int8.onnx, calibrated without data, and tell what every step gives."
Int8 = Annotated[bool, o.output_option("--int8", help=INT8)]
STEPS = "Tell size, time and forecast of every step, timed in turns."
Steps = Annotated[bool, o.output_option("--steps", help=STEPS)]
COMPILED = "Time torch.compile too, which takes a minute or more to compile."
Compiled = Annotated[bool, o.output_option("--compiled", help=COMPILED)]


@guarded
def export(
    model: o.Model,
    out: Out = Path("model.onnx"),
    weights: o.Weights = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    task: o.Task = None,
    tolerance: Tolerance = 1e-3,
    int8: Int8 = False,
    steps: Steps = False,
    compiled: Compiled = False,
    threads: o.Threads = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Write a network for other runtimes: ONNX, int8, torch.export, ExecuTorch, OpenVINO."""
    screen = Screen(json, quiet)
    check_writable(out)
    if out.suffix not in FORMATS:
        raise UsageError(f"--out {out}: the name must end in {', '.join(FORMATS)}")
    if (int8 or steps or compiled) and out.suffix != ".onnx":
        raise UsageError("--int8, --steps and --compiled are of ONNX: --out must end in .onnx")
    FORMATS[out.suffix]()
    network = build(
        screen, model, weights, task=task, input_size=input_size, classes=classes, threads=threads
    )
    written: dict[str, Any] = {"model": model, "out": str(out)}
    with screen.stage(f"writing {out.name} and checking it"):
        written |= _write(network, out, tolerance)
    written["bytes"] = out.stat().st_size
    if int8 or steps or compiled:
        written |= _steps(screen, network, out, int8, compiled, threads, seed)
    screen.data(written)
    checked = f", {written['error']:.1g} from PyTorch" if "error" in written else ""
    batches = "" if out.suffix == ".pte" else ", any batch size"
    screen.say(f"wrote {bold(out)}: {human(written['bytes'])}B{batches}{checked}")
    if int8:
        screen.say(f"wrote {bold(written['int8'])}: {human(written['int8_bytes'])}B")
    for line in written.get("notes", []):
        screen.warn(line)
    if DEPLOYMENT in written:
        screen.say("", table(HEADINGS, step_texts(written[DEPLOYMENT])))


def _write(network: Network, out: Path, tolerance: float) -> dict[str, Any]:
    write = CHECKED.get(out.suffix)
    if write is not None:
        return {"error": write(network.model, network.example, out, tolerance)}
    export_program(network.model, network.example, out)
    return {}


@own_randomness()
def _steps(
    screen: Screen,
    network: Network,
    out: Path,
    int8: bool,
    compiled: bool,
    threads: int | None,
    seed: int,
) -> dict[str, Any]:
    """The file in int8, and what every step from the original network on gives."""
    made: dict[str, Any] = {}
    known = (origin(network) or {}).get("network") or {}
    original = before(known)
    first = network if original is None else original
    prepared = prepare(screen, first, seed=seed)
    name = "original" if original is None else "slim"
    models = {"original": first.model} | ({} if original is None else {"slim": network.model})
    files = {name: out}
    if int8:
        files["int8"] = out.with_suffix(".int8.onnx")
        with screen.stage("quantising"):
            quantise_onnx(out, files["int8"], list(prepared.fresh.collection().batches))
        made |= {"int8": str(files["int8"]), "int8_bytes": files["int8"].stat().st_size}
    with screen.stage("timing every step"), noting() as notes:
        judge = prepared.judges.forecaster
        rows = table_of_steps(
            models, files, network.example, judge, compiled=compiled, threads=threads
        )
    return made | {DEPLOYMENT: rows, "notes": list(notes)}
