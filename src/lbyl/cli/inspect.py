"""`lbyl inspect`: which channels can go, and what follows each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbyl.cli import options as o
from lbyl.cli.errors import guarded
from lbyl.cli.job import follow
from lbyl.cli.screen import Screen, bold, human, plain, table
from lbyl.cli.setup import build

if TYPE_CHECKING:
    from lbyl import Graph
    from lbyl.models import Network

Full = Annotated[bool, typer.Option("--full", help="Every consequence of every group, as text.")]


@guarded
def inspect(
    model: o.Model,
    weights: o.Weights = None,
    skip: o.Skip = None,
    modules: o.Modules = None,
    streams: o.Streams = False,
    input_size: o.InputSize = None,
    classes: o.Classes = None,
    full: Full = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Show which filters can be removed, who reads them, and why a layer is left alone."""
    screen = Screen(json, quiet)
    network = build(screen, model, weights, input_size=input_size, classes=classes, trained=False)
    choice = o.given(modules=modules or None, skip=skip or None)
    graph = follow(screen, network, streams=streams, **choice)
    screen.data(as_data(network, graph))
    if full:
        screen.say(plain(str(graph)))
        return
    show(screen, network, graph)


def as_data(network: Network, graph: Graph) -> dict[str, Any]:
    """The graph for programs."""
    from dataclasses import asdict

    from lbyl.result import Size

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
                "stream": unit.stream,
            }
            for unit in graph
        ],
        "left_alone": dict(graph.left_alone),
    }


def show(screen: Screen, network: Network, graph: Graph) -> None:
    """The graph for people."""
    from lbyl.result import Size

    size = Size.of(network.model, graph)
    shape = "×".join(map(str, network.input_shape))
    screen.say(
        f"\n{bold(network.name)}: {human(size.parameters)} parameters, {human(size.macs)} MACs "
        f"at {shape}; {graph.channels} prunable channels in {len(graph)} groups"
    )
    rows = [
        [
            unit.name + (" (stream)" if unit.stream else ""),
            unit.channels,
            _some([p.name for p in unit.producers][1:]),
            _some(unit.between),
            _some(unit.consumers),
        ]
        for unit in graph
    ]
    screen.say(table(["made by", "channels", "and by", "sliced along", "read by"], rows))
    if graph.left_alone:
        screen.say("[bold]left alone[/]")
        by_reason: dict[str, list[str]] = {}
        for name, reason in graph.left_alone.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            screen.say(f"  {plain(_some(names, 6))}: [dim]{plain(reason)}[/]")


def _some(names: Any, count: int = 2) -> str:
    names = list(names)
    more = f" +{len(names) - count}" if len(names) > count else ""
    return ", ".join(names[:count]) + more
