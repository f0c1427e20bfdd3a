"""A compression with its stages shown one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lbyl.cli.screen import Screen
from lbyl.cli.setup import calibration_batches

if TYPE_CHECKING:
    from lbyl import Graph, Result, Statistics
    from lbyl.models import Network

FOLLOWING = "following its channels"
BUDGETS = {"macs", "params", "latency", "max_error"}


@dataclass(frozen=True)
class Done:
    """A result, and the statistics it was made with."""

    result: Result
    statistics: Statistics | None


@dataclass(frozen=True)
class Job:
    """What to do to a network."""

    method: Any
    criterion: Any
    graph: dict[str, Any]
    choice: dict[str, Any]
    seed: int = 0
    images: int | str | None = None

    def run(self, screen: Screen, network: Network, calibration: str | None = None) -> Done:
        """Trace, collect and compress, each as a stage of its own."""
        import lbyl
        from lbyl.ratios import check_ratio
        from lbyl.repair import check_repair

        check_repair(self.repair)
        graph = follow(screen, network, **self.graph)
        if "ratio" in self.choice:  # before anything takes long
            check_ratio(graph, self.choice["ratio"])
        running, statistics, batches = graph.units and self._runs(calibration), None, None
        if running or self.choice.get("refine"):
            batches = calibration_batches(screen, network, calibration)
        if running:
            statistics = run_once(screen, network, graph, batches, self.seed, self.images)
        with screen.stage("removing filters and restoring") as tick:
            result = lbyl.compress(
                network.model,
                network.example,
                graph=graph,
                statistics=statistics,
                calibration=batches,
                method=self.method,
                criterion=self.criterion,
                seed=self.seed,
                progress=tick.named,
                **self.choice,
            )
        # The stages before belong to this compression too: reports tell where the time went.
        spent = dict(statistics.seconds) if statistics is not None else {}
        seconds = {**result.seconds, "trace": screen.seconds.get(FOLLOWING, 0.0), **spent}
        return Done(replace(result, seconds=seconds), statistics)

    @property
    def repair(self) -> str:
        """The repair asked for, or the method's own."""
        return str(self.choice.get("repair", self.method.default_repair))

    def _runs(self, calibration: str | None) -> bool:
        """Whether the network has to be run on images; budgets are kept by measuring."""
        asked = self.method.needs_statistics or self.repair != "none"
        asked = asked and not (self.method.analytic and calibration is None)
        return asked or self.criterion.needs_statistics or bool(BUDGETS & self.choice.keys())


def follow(screen: Screen, network: Network, **choice: Any) -> Graph:
    """The network's graph."""
    import lbyl

    with screen.stage(FOLLOWING):
        return lbyl.trace(network.model, network.example, **choice)


def run_once(
    screen: Screen,
    network: Network,
    graph: Graph,
    batches: list[Any] | None,
    seed: int,
    images: int | str | None = None,
) -> Statistics:
    """The statistics that every ratio, criterion and method can use."""
    import lbyl

    with screen.stage(f"running it on {'your' if batches else 'procedural'} images") as tick:
        return lbyl.collect(
            network.model,
            network.example,
            graph=graph,
            calibration=batches,
            images=images,
            seed=seed,
            progress=tick.named,
        )
