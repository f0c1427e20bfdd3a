"""`lbyl inspect`: which channels can be pruned, and what follows each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from lbyl import Graph
from lbyl.app.cli import options as o
from lbyl.app.cli.errors import guarded
from lbyl.app.cli.screen import Screen, bold, plain, table
from lbyl.app.cli.setup import build, prepare
from lbyl.app.sources import Network
from lbyl.result import Size
from lbyl.runtime.format import counted, human

Full = Annotated[bool, o.output_option("--full", help="Every consequence of every unit, as text.")]
LISTS = ("consumed by", "sliced along", "tied with")


@guarded
def inspect(
    model: o.Model,
    weights: o.Weights = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    residual: o.Residual = False,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    task: o.Task = None,
    full: Full = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Show which channels can be pruned, who consumes them, and which layers cannot."""
    screen = Screen(json, quiet)
    network = build(
        screen, model, weights, task=task, input_size=input_size, classes=classes, trained=False
    )
    graph = prepare(screen, network, include=include, exclude=exclude, residual=residual).graph
    screen.data(as_data(network, graph))
    if full:
        screen.say(plain(str(graph)))
        return
    show(screen, network, graph)


def as_data(network: Network, graph: Graph) -> dict[str, Any]:
    """The graph for programs."""
    return {
        "model": network.name,
        "input_shape": list(network.input_shape),
        **asdict(Size.of(network.model, graph)),
        "units": [
            {
                "name": unit.name,
                "channels": unit.channels,
                "producers": [p.name for p in unit.producers],
                "between": list(unit.between),
                "path": list(unit.path),
                "consumers": list(unit.consumers),
                "residual": unit.residual,
            }
            for unit in graph
        ],
        "unprunable": dict(graph.unprunable),
    }


def show(screen: Screen, network: Network, graph: Graph) -> None:
    """The graph for people."""
    size = Size.of(network.model, graph)
    shape = "×".join(map(str, network.input_shape))
    screen.say(
        f"\n{bold(network.name)}: {human(size.parameters)} parameters, {human(size.macs)} MACs "
        f"at {shape}; {counted(graph.channels, 'prunable channel')} in "
        f"{counted(len(graph), 'unit')}"
    )
    rows = [
        [
            unit.name + (" (residual)" if unit.residual else ""),
            unit.channels,
            _first(unit.consumers),
            _first(unit.between),
            _first([p.name for p in unit.producers][1:]),
        ]
        for unit in graph
    ]
    tied = any(len(unit.producers) > 1 for unit in graph)
    columns = ["unit", "channels", *(LISTS if tied else LISTS[:-1])]
    screen.say(table(columns, [row[: len(columns)] for row in rows], lists=LISTS))
    if graph.unprunable:
        screen.say("[bold]unprunable[/]")
        by_reason: dict[str, list[str]] = {}
        for name, reason in graph.unprunable.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            screen.say(f"  {plain(_first(names, 6))}: [dim]{plain(reason)}[/]")


def _first(names: Sequence[str], count: int = 2) -> str:
    """The first names, and how many more there are."""
    more = f" +{len(names) - count}" if len(names) > count else ""
    return ", ".join(names[:count]) + more
