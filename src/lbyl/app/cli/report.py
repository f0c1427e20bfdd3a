"""`lbyl report`: the HTML page of a compression that was saved, or of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from lbyl import LbylError, Result
from lbyl.app.cli import options as o
from lbyl.app.cli.errors import UsageError, guarded
from lbyl.app.cli.files import LEFT_OUT, before, page, renamed, stored
from lbyl.app.cli.parse import parse_data
from lbyl.app.cli.screen import Screen, bold
from lbyl.app.cli.setup import check_writable, prepare
from lbyl.app.report import Run, write_several, write_tradeoff
from lbyl.app.report.fill import parts, together
from lbyl.app.sources import resolve
from lbyl.app.sweep import Store
from lbyl.runtime.files import read_json, write_json
from lbyl.storage.files import PLAN, REPORT, SHOWN

Directories = Annotated[
    list[Path],
    typer.Argument(
        help="What `lbyl compress --out` or `lbyl sweep` wrote; several are compared on one page.",
        metavar="DIRECTORY...",
    ),
]
Original = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="The network, where the directory does not say or may not."
    ),
]
Target = Annotated[
    Path | None,
    o.output_option(metavar="FILE", help="File to write; report.html unless given."),
]
Comparison = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What `lbyl compare --json` printed, to show beside it."),
]


@guarded
def report(
    directories: Directories,
    model: Original = None,
    out: Target = None,
    comparison: Comparison = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Write the report of a saved compression, or of a sweep."""
    screen = Screen(json, quiet)
    directory, *others = directories
    if others:
        if model or comparison:
            raise UsageError("--model and --comparison are of one compression: give one directory")
        several(screen, directories, out or Path(REPORT))
        return
    if directory.is_file():
        if model or comparison:
            raise UsageError("a sweep knows its networks: leave --model and --comparison out")
        target = out or directory.with_suffix(".html")
        with screen.stage("writing the report"), Store(directory, writable=False) as store:
            write_tradeoff(store.rows(), target)
        screen.data({"out": str(target)})
        screen.say(f"wrote {bold(target)}")
        return
    target = out or directory / REPORT
    check_writable(target)
    with screen.stage("reading the result"):
        document = read_json(directory / PLAN)
        network = resolve(model, directory) if model else resolve(str(directory))
        result = stored(document, network.model)
        compared = read_json(comparison) if comparison else None
        shown = read_json(directory / SHOWN) if (directory / SHOWN).is_file() else {}
        if not isinstance(shown, dict):
            raise LbylError(f"{directory / SHOWN} is no JSON object: leave it out, and write again")
    if shown.get(LEFT_OUT):
        shown = completed(screen, document, result, shown, model)
        write_json(directory / SHOWN, shown)
    with screen.stage("writing the report"):
        page(document, result, target, shown, renamed(network, document), directory, compared)
    screen.data({"out": str(target)})
    screen.say(f"wrote {bold(target)}")


def completed(
    screen: Screen,
    document: dict[str, Any],
    result: Result,
    shown: dict[str, Any],
    model: str | None,
) -> dict[str, Any]:
    """What a report shows, with the parts that were left out for time."""
    missing: list[str] = shown[LEFT_OUT]
    original = before(document.get("network") or {}, model)
    if original is None:
        screen.warn(
            f"{', '.join(missing)}: left out, for the network before its compression is not here "
            "(--model names it)"
        )
        return shown
    known = document.get("settings") or {}
    prepared = prepare(
        screen,
        original,
        source=parse_data(known.get("data")),
        include=known.get("include"),
        exclude=known.get("exclude"),
        residual=bool(known.get("residual")),
        seed=known.get("seed") or 0,
    )
    found = [{key: value for key, value in shown.items() if key != LEFT_OUT}]
    for name, part in parts(prepared, result).items():
        if name in missing:
            with screen.stage(name):
                found.append(part())
    return together(found)


def several(screen: Screen, directories: list[Path], target: Path) -> None:
    """One page about several compressions."""
    check_writable(target)
    with screen.stage("reading the results"):
        names = [directory.name or str(directory) for directory in directories]
        clear = names if len(set(names)) == len(names) else list(map(str, directories))
        runs = [run(name, directory) for name, directory in zip(clear, directories)]
    with screen.stage("writing the report"):
        write_several(runs, target)
    screen.data({"out": str(target)})
    screen.say(f"wrote {bold(target)}")


def run(name: str, directory: Path) -> Run:
    """What a directory says of its compression; the network itself is not needed."""
    document = read_json(directory / PLAN)
    result = stored(document, nn.Identity())
    measured = document.get("accuracy") or {}
    commands = [*document.get("earlier", []), document.get("command")]
    text = "\n".join(filter(None, commands))
    return Run(name, result, measured.get("slim"), measured.get("original"), text)
