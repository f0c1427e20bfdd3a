"""`lbyl compress`: the whole way in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lbyl.cli import options as o
from lbyl.cli.errors import UsageError, guarded
from lbyl.cli.files import Package, loading
from lbyl.cli.job import Done, Job
from lbyl.cli.screen import Screen, bold, change, human, plain, some, table
from lbyl.cli.setup import build, load_images, measure

if TYPE_CHECKING:
    from lbyl.models import Network

Onnx = Annotated[bool, o.output_option("--onnx", help="Also write model.onnx, checked.")]
Report = Annotated[bool, o.output_option(help="Write report.html.")]

# ONNX Runtime's kernels work on blocks of eight channels: odd widths can be slower than the
# original (benchmarks/latency.py). PyTorch on the CPU does not care.
ONNX_MULTIPLE = 8


@guarded
def compress(
    model: o.Model,
    weights: o.Weights = None,
    ratio: o.Ratio = None,
    criterion: o.Criterion = "l2",
    method: o.Method = "echo",
    option: o.MethodOption = None,
    repair: o.Repair = None,
    refine: o.Refine = 0,
    skip: o.Skip = None,
    modules: o.Modules = None,
    streams: o.Streams = False,
    round_to: o.RoundTo = None,
    macs: o.Macs = None,
    params: o.Params = None,
    latency: o.Latency = None,
    max_error: o.MaxError = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    mean: o.Mean = None,
    std: o.Std = None,
    data: o.Data = None,
    limit: o.Limit = None,
    calibration: o.Calibration = None,
    images: o.Images = None,
    out: o.Out = None,
    onnx: Onnx = False,
    report: Report = True,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Make a network smaller and put its accuracy back: no data, no training."""
    screen = Screen(json, quiet)
    check_target(out, onnx)
    if onnx and round_to is None:
        round_to = ONNX_MULTIPLE
    budget = o.check_budget(macs=macs, params=params, latency=latency, max_error=max_error)
    job = Job(
        method=o.parse_method(method, option),
        criterion=o.parse_criterion(criterion, seed),
        graph=o.given(modules=modules or None, skip=skip or None) | {"streams": streams},
        choice=o.given(ratio=o.parse_ratio(ratio), round_to=round_to, repair=repair, refine=refine)
        | budget,
        seed=seed,
        images=o.parse_images(images),
    )
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    network = build(
        screen, model, weights, classes=classes, device=device, threads=threads, **scale
    )
    held = load_images(screen, network, data, limit=limit) if data else None
    done = job.run(screen, network, calibration)
    accuracy = None
    if held is not None:
        before = measure(screen, network, held, stage="accuracy of the original")
        after = measure(screen, network, held, done.result.model, "accuracy of the smaller one")
        accuracy = {"original": before, "slim": after}
    package = Package(network, done, accuracy)
    written = package.write(screen, out, onnx, report) if out else {}
    show(screen, network, done, accuracy, written)


def check_target(out: Path | None, onnx: bool) -> None:
    """What would fail at the end is better said at the beginning."""
    if onnx and out is None:
        raise UsageError("--onnx needs a directory to write to: add --out DIR")
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a directory")
    if onnx:
        from lbyl.export import check_onnx

        check_onnx()


def show(
    screen: Screen,
    network: Network,
    done: Done,
    accuracy: dict[str, float] | None,
    written: dict[str, Any],
) -> None:
    """The story in one table, or all of it as JSON."""
    from lbyl.result import refined

    result = done.result
    document = {"model": network.name, **result.to_dict(plan=False), "stages": screen.seconds}
    screen.data(document | {"accuracy": accuracy, **written})
    rows = [
        [noun, human(was), human(now), change(was, now)]
        for noun, was, now in (
            ("parameters", result.before.parameters, result.after.parameters),
            ("MACs", result.before.macs, result.after.macs),
            ("bytes", result.before.bytes, result.after.bytes),
        )
    ]
    if accuracy:
        was, now = accuracy["original"], accuracy["slim"]
        rows.append(["accuracy", f"{was:.2f} %", f"{now:.2f} %", f"{now - was:+.2f}"])
    how = f"restored by {result.method}" if result.method != "none" else "nothing restored"
    how += refined(result.refine)
    count = sum(row.channels - row.kept for row in result.rows)
    screen.say(
        f"\n{bold(network.name)}: {count} filters removed from {some(len(result.rows), 'layer')} "
        f"by {result.criterion}, {how}",
        table(["", "before", "after", "change"], rows),
    )
    alone = len(result.graph.left_alone)
    if alone:
        left = f"{some(alone, 'layer')} left alone; why: lbyl inspect {network.name}"
        screen.say(f"[dim]{plain(left)}[/]")
    for line in written.get("notes", []):
        screen.warn(line)
    if "files" in written:
        screen.say(f"wrote {bold(written['out'])}: {', '.join(written['files'])}", "")
        screen.say(
            *(f"    [cyan]{plain(line)}[/]" for line in loading(network, written["out"])), ""
        )
