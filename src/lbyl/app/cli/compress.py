"""`lbyl compress`: the whole way in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from lbyl import Result
from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, fail, guarded, usage
from lbyl.app.cli.files import DEPLOYMENT, Package, Runtimes
from lbyl.app.cli.loading import loading
from lbyl.app.cli.parse import (
    check_limit,
    check_source_used,
    parse_amount,
    parse_criterion,
    parse_data,
    parse_method,
    parse_task,
    typed,
)
from lbyl.app.cli.screen import Screen, bold, plain, table
from lbyl.app.cli.setup import Accuracies, build, check_writable, prepare
from lbyl.app.deploy import HEADINGS, OnnxNetwork, step_texts, target_of
from lbyl.app.sources import Network
from lbyl.app.sources.hf import with_task
from lbyl.app.streaming import compress_blocks
from lbyl.latency import Timing, compare
from lbyl.planning.candidates import check_time
from lbyl.planning.ratio import check_ratio
from lbyl.planning.task import DEFAULT_CRITERION, DEFAULT_RATIO
from lbyl.result import UNKNOWN
from lbyl.runtime.format import counted, human, percent, percent_change
from lbyl.runtime.run import device_of
from lbyl.storage.files import INT8 as INT8_FILE

SHOWN_FALLBACKS = 3  # of what was done otherwise than meant
ONNX = "Also write model.onnx, checked; keeps multiples of 8 channels without --multiple-of."
Onnx = Annotated[bool, o.output_option("--onnx", help=ONNX)]
INT8 = "Also write model.int8.onnx, calibrated without data, and tell what every step gives."
Int8 = Annotated[bool, o.output_option("--int8", help=INT8)]
TARGET = "onnx-cpu, tensorrt or executorch: widths that it likes, and the file that it reads."
For = Annotated[str | None, o.output_option("--target", metavar="NAME", help=TARGET)]
Report = Annotated[bool, o.output_option(help="Write report.html.")]
BY_BLOCK = "Read hf:DIR block by block, never all of it: ratios, l2 or echo, --include, --out."
ANYWAY = "Write a network that is forecast to keep less than half of the accuracy, too."
Anyway = Annotated[bool, o.output_option("--anyway", help=ANYWAY)]
LOST = 3  # the status of a network that was not written because it is lost
ByBlock = Annotated[bool, o.output_option("--by-block", help=BY_BLOCK)]


@guarded
def compress(
    model: o.Model,
    weights: o.Weights = None,
    ratio: o.Ratio = None,
    macs: o.Macs = None,
    params: o.Params = None,
    latency: o.Latency = None,
    max_error: o.MaxError = None,
    keep: o.Keep = None,
    criterion: o.Criterion = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    residual: o.Residual = False,
    multiple_of: o.MultipleOf = None,
    method: o.Method = "echo",
    option: o.MethodOption = None,
    correction: o.Correction = None,
    refine: o.Refine = 0,
    data: o.Data = None,
    test: o.Test = None,
    limit: o.Limit = None,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    task: o.Task = None,
    mean: o.Mean = None,
    std: o.Std = None,
    out: o.Out = None,
    onnx: Onnx = False,
    int8: Int8 = False,
    target: For = None,
    report: Report = True,
    anyway: Anyway = False,
    by_block: ByBlock = False,
    device: o.Device = "auto",
    threads: o.Threads = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Make a network smaller and restore its accuracy: no data, no training."""
    screen = Screen(json, quiet)
    runtimes = check_target(out, onnx, int8, target)
    multiple_of = widths(screen, runtimes, target, multiple_of)
    budgets = {"macs": macs, "params": params, "latency": latency, "max_error": max_error}
    amount = parse_amount(ratio, **budgets, keep=keep)
    by, restoring = parse_criterion(criterion, seed), parse_method(method, option, correction)
    if by_block:
        with usage():
            model = with_task(model, task)
        check_by_block(model, out, amount, runtimes)
        compress_by_block(screen, model, out, amount, criterion, include, multiple_of, seed)
        return
    source = parse_data(data)
    check_source_used(source, [parse_task(amount, by, restoring, multiple_of)], refine)
    check_limit(test, limit)
    scale: dict[str, Any] = {"mean": mean, "std": std, "input_size": input_size}
    machine: dict[str, Any] = {"device": device, "threads": threads}
    network = build(screen, model, weights, task=task, classes=classes, **machine, **scale)
    accuracy = Accuracies.on(screen, network, test, limit)
    where: dict[str, Any] = {"include": include, "exclude": exclude, "residual": residual}
    prepared = prepare(screen, network, source=source, seed=seed, **where)
    if isinstance(amount, (float, dict)):
        check_ratio(prepared.graph, amount)  # before anything takes long
    accuracy.measure("original", "accuracy of the original")
    how: dict[str, Any] = {"criterion": by, "method": restoring, "multiple_of": multiple_of}
    with screen.stage("compressing"):
        result = prepared.compress(amount, refine=refine, **how)
    accuracy.measure("slim", "accuracy of the smaller one", result.model)
    times = timed(screen, network, result, latency) if latency is not None else {}
    settings = {**where, "data": data, "seed": seed}
    package = Package(network, prepared, result, accuracy.found or None, times or None, settings)
    refused = result.lost and not anyway
    written = package.write(screen, out, runtimes, report) if out and not refused else {}
    if out and written and runtimes.int8 and test:
        accuracy.measure("int8", "accuracy in int8", OnnxNetwork(out / INT8_FILE, threads))
    given: dict[str, Any] = {"weights": weights, "classes": classes, "task": task}
    why = typed("inspect", model, input_size=input_size, **given, **where)
    show(screen, package.named, result, accuracy.found or None, written, times, why)
    if refused:
        fail("the smaller network is lost: nothing was written; prune less, or add --anyway", LOST)
    show_files(screen, package.named, written)


def check_by_block(model: str, out: Path | None, amount: Any, runtimes: Runtimes) -> None:
    """What block by block is not possible is said before anything is read."""
    if runtimes != Runtimes():
        raise UsageError("--by-block writes a checkpoint: leave --onnx, --int8, --target out")
    if not model.startswith("hf:") or out is None:
        raise UsageError("--by-block reads hf:DIRECTORY and writes to --out DIR: give both")
    if not (amount is None or isinstance(amount, (float, dict))):
        raise UsageError("--by-block prunes every block alike: give --ratio, not a budget")


def compress_by_block(
    screen: Screen,
    model: str,
    out: Path | None,
    amount: Any,
    criterion: str | None,
    include: list[str] | None,
    multiple_of: int | None,
    seed: int,
) -> None:
    """A checkpoint larger than memory: each block is read, restored, written and forgotten."""
    assert out is not None
    with screen.stage("compressing block by block"):
        report = compress_blocks(
            model.partition(":")[2],
            out,
            DEFAULT_RATIO if amount is None else amount,
            include=include or "*",
            criterion=criterion or DEFAULT_CRITERION,
            multiple_of=multiple_of,
            seed=seed,
            progress=screen.progress,
        )
    screen.data({"model": model, "out": str(out), **asdict(report), "directory": str(out)})
    screen.say(*(plain(line) for line in [*str(report).splitlines(), UNKNOWN]))


def timed(screen: Screen, network: Network, result: Result, asked: float) -> dict[str, Timing]:
    """The time of both networks, measured in turns, where time was what the budget is of."""
    models = {"original": network.model, "slim": result.model}
    with screen.stage("timing both networks"):
        times = compare(models, network.example, device_of(network.model))
    check_time(asked, times["slim"].median / times["original"].median)
    return times


def check_target(out: Path | None, onnx: bool, int8: bool, target: str | None) -> Runtimes:
    """What would fail at the end is better said at the beginning."""
    with usage():
        writes = None if target is None else target_of(target).writes
    given = {"--onnx": onnx, "--int8": int8, "--target": target is not None}
    asked = [option for option, on in given.items() if on]
    if asked and out is None:
        raise UsageError(f"{asked[0]} needs a directory to write to: add --out DIR")
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a directory")
    if out is not None:
        check_writable(out)
    runtimes = Runtimes(onnx or int8 or writes == "onnx", int8, writes == "executorch")
    runtimes.check()
    return runtimes


def widths(
    screen: Screen, runtimes: Runtimes, target: str | None, multiple_of: int | None
) -> int | None:
    """Of how many channels multiples are kept: as asked for, else as whoever runs them likes."""
    if multiple_of is not None or not (runtimes.onnx or target):
        return multiple_of
    # Odd widths can be slower there than the original (benchmarks/latency.py). PyTorch on the CPU
    # does not care.
    liked = target_of(target or "onnx-cpu")
    option = f"--target {target}" if target else "--int8" if runtimes.int8 else "--onnx"
    screen.warn(
        f"{option} keeps multiples of {liked.multiple_of} channels ({liked.why}): "
        "--multiple-of 1 keeps any"
    )
    return liked.multiple_of


def show(
    screen: Screen,
    network: Network,
    result: Result,
    accuracy: dict[str, float] | None,
    written: dict[str, Any],
    times: dict[str, Timing],
    why: str,
) -> None:
    """How much is kept, what was done and a table, or all of it as JSON."""
    document = {"model": network.name, **result.to_dict(plan=False), "stages": screen.seconds}
    seconds = {name: timing.median for name, timing in times.items()} or None
    told: dict[str, Any] = {"story": result.story, "lost": result.lost}
    told |= {"accuracy": accuracy, "latency": seconds}
    screen.data(document | told | written)
    screen.say("", *(bold(line) for line in kept(result, accuracy)))
    screen.say(
        f"{bold(network.name)}: {pruned(result)}",
        *(f"[dim]{plain(line)}[/]" for line in [*result.expected[1:], result.story]),
        table(["", "before", "after", "change"], figures(result, accuracy, seconds)),
    )
    for line in remarks(result, why):
        screen.say(f"[dim]{plain(line)}[/]")
    for line in told_first(result.fallbacks):
        screen.warn(line)


def told_first(fallbacks: Sequence[str]) -> list[str]:
    """What was done otherwise than meant: the first lines, and how many there are."""
    more = len(fallbacks) - SHOWN_FALLBACKS
    rest = [f"and {more} more: see fallbacks in plan.json"] if more > 0 else []
    return [*fallbacks[:SHOWN_FALLBACKS], *rest]


def figures(
    result: Result, accuracy: dict[str, float] | None, seconds: dict[str, float] | None
) -> list[list[str]]:
    """Before and after: sizes, and what was measured."""
    rows = [
        [noun, human(was), human(now), percent_change(was, now)]
        for noun, was, now in (
            ("parameters", result.before.parameters, result.after.parameters),
            ("MACs", result.before.macs, result.after.macs),
            ("bytes", result.before.bytes, result.after.bytes),
        )
    ]
    measured = accuracy or {}
    for name, noun in (("slim", "accuracy"), ("int8", "accuracy, int8")):
        if name in measured:
            before, after = measured["original"], measured[name]
            rows.append([noun, f"{before:.2f} %", f"{after:.2f} %", f"{after - before:+.2f}"])
    if seconds:
        before, after = 1e3 * seconds["original"], 1e3 * seconds["slim"]
        change = percent_change(before, after)
        rows.append(["one input", f"{before:.2f} ms", f"{after:.2f} ms", change])
    return rows


def show_files(screen: Screen, network: Network, written: dict[str, Any]) -> None:
    """What was written, what each step to int8 gives, and how to load it."""
    if DEPLOYMENT in written:
        screen.say("", table(HEADINGS, step_texts(written[DEPLOYMENT])))
    for line in written.get("notes", []):
        screen.warn(line)
    if not written:
        screen.warn("nothing was written: add --out DIR to keep the smaller network")
        return
    screen.say(f"wrote {bold(written['out'])}: {', '.join(written['files'])}", "")
    lines = loading(network, written["out"])
    screen.say(*(f"    [cyan]{plain(line)}[/]" for line in lines), "")


def kept(result: Result, accuracy: dict[str, float] | None) -> list[str]:
    """The first figure: how much accuracy is kept, and the truth beside it where it is known."""
    lines = [UNKNOWN if result.forecast is None else f"forecast: {result.forecast}"]
    if accuracy and accuracy["original"]:
        fraction = accuracy["slim"] / accuracy["original"]
        lines.append(f"measured: keeps {percent(fraction)} of the accuracy")
    return lines


def pruned(result: Result) -> str:
    """How many channels of how many layers were pruned."""
    rows = [row for row in result.rows if row.kept < row.channels]
    count, total = (
        sum(row.channels - row.kept for row in rows),
        sum(row.channels for row in result.rows),
    )
    return f"{count} of {counted(total, 'channel')} pruned, in {counted(len(rows), 'layer')}"


def remarks(result: Result, why: str) -> list[str]:
    """Where the error is largest, how many layers could not be pruned and what says why."""
    lines = []
    errors = {row.unit: row.error for row in result.rows if row.error is not None}
    if errors:
        worst = max(errors, key=errors.__getitem__)
        mean = sum(errors.values()) / len(errors)
        lines.append(
            f"error at the consumers: {mean:.3f} on average, largest {errors[worst]:.3f} "
            f"behind {worst}"
        )
    if result.graph.unprunable:
        count = counted(len(result.graph.unprunable), "unprunable layer")
        lines.append(f"{count}; why: {why}")
    return lines
