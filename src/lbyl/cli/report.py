"""`lbyl report`: the HTML page of a compression that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import guarded
from lbyl.cli.files import REPORT, loading
from lbyl.cli.screen import Screen, bold

if TYPE_CHECKING:
    from lbyl import Result
    from lbyl.models import Network

Directory = Annotated[Path, typer.Argument(help="What `lbyl compress --out` wrote.")]
Original = Annotated[
    str | None,
    typer.Option("--model", help="The network, where the directory does not say or may not."),
]
Target = Annotated[Path | None, typer.Option(help="File to write; report.html beside the model.")]
Comparison = Annotated[
    Path | None, typer.Option(help="What `lbyl compare --json` printed, to show beside it.")
]


@guarded
def report(
    directory: Directory,
    model: Original = None,
    out: Target = None,
    comparison: Comparison = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Write the report of a saved compression again, also with a comparison in it."""
    screen = Screen(json, quiet)
    target = out or directory / REPORT
    with screen.stage("reading the result"):
        from lbyl.io import PLAN, read_json
        from lbyl.models import resolve

        document = read_json(directory / PLAN)
        network = resolve(model, directory) if model else resolve(str(directory))
        result = stored(document, network)
        compared = read_json(comparison) if comparison else None
    with screen.stage("writing the report"):
        from lbyl.report import write_report

        write_report(
            result,
            target,
            accuracy=document.get("accuracy"),
            comparison=compared and compared.get("rows"),
            command=document.get("command"),
            loader="\n".join(loading(named(network, document), str(directory))),
        )
    screen.data({"out": str(target)})
    screen.say(f"wrote {bold(target)}")


def named(network: Network, document: dict[str, Any]) -> Network:
    """The network under the name it was compressed by."""
    from dataclasses import replace

    known = document.get("network") or {}
    return replace(network, name=str(known.get("name", network.name)))


def stored(document: dict[str, Any], network: Network) -> Result:
    """A result as plan.json tells it; the graph holds only what was left alone."""
    from lbyl import Graph, LbylError, Plan, Result
    from lbyl.result import Row, Size

    told = document.get("result")
    if not isinstance(told, dict):
        raise LbylError("this plan.json tells no result: compress the network again")
    try:
        graph = Graph((), {}, {}, told["left_alone"], {}, (), (), {})
        return Result(
            network.model,
            Plan.from_dict(document),
            graph,
            Size(**told["before"]),
            Size(**told["after"]),
            tuple(Row(**row) for row in told["rows"]),
            told["method"],
            told["criterion"],
            told["repair"],
            told["seconds"],
            told.get("refine", 0),  # older plans do not know of it
        )
    except (KeyError, TypeError) as error:
        raise LbylError(f"the result in plan.json is incomplete: {error}") from error
