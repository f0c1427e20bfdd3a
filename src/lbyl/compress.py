"""The one function: a model goes in, a smaller one with its accuracy put back comes out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lbyl.criteria import Criterion, criteria
from lbyl.errors import errors
from lbyl.exceptions import LbylError
from lbyl.pipeline import Progress, Restoration, restore
from lbyl.plan import Plan
from lbyl.ratios import Ratio, counts
from lbyl.record import Inputs
from lbyl.repair import check_repair
from lbyl.restore import Method, methods
from lbyl.result import Result, Row, Size
from lbyl.statistics import Statistics, collect
from lbyl.trace import check_model, trace
from lbyl.unit import Graph
from lbyl.weights import unit_weights


def compress(
    model: nn.Module,
    example_inputs: Inputs,
    ratio: Ratio | None = None,
    *,
    criterion: str | Criterion = "l2",
    method: str | Method = "echo",
    repair: str | None = None,
    statistics: Statistics | None = None,
    calibration: Iterable[Any] | Tensor | None = None,
    plan: Plan | None = None,
    graph: Graph | None = None,
    modules: str | Sequence[str] = "*",
    skip: str | Sequence[str] = (),
    streams: bool = False,
    round_to: int | None = None,
    images: int | None = None,
    taps: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Remove a share of the filters of `model` and restore what they carried.

    The model given is never changed. `ratio` is the share of channels that go: one number, or
    patterns of layer names with a number each. `statistics` from an earlier `collect` saves
    running the network again; `calibration` gives unlabelled inputs of the user's own.
    """
    chosen, how = criteria.resolve(criterion), methods.resolve(method)
    mend = how.default_repair if repair is None else repair
    check_repair(mend)
    clock = Clock()
    if graph is None:
        graph = trace(model, example_inputs, streams=streams, modules=modules, skip=skip)
    else:
        check_model(model)
    _check_prunable(graph)
    clock.lap("trace")
    if statistics is None and (how.needs_statistics or chosen.needs_statistics or mend != "none"):
        statistics = collect(
            model,
            example_inputs,
            graph=graph,
            calibration=calibration,
            images=images,
            taps=taps,
            seed=seed,
        )
        clock.laps.update(statistics.seconds)
        clock.skip()
    if plan is None:
        plan = make_plan(
            model, graph, 0.3 if ratio is None else ratio, chosen, how, round_to, statistics
        )
    plan.check(graph)
    clock.lap("plan")
    done = restore(model, graph, plan, how, statistics, mend, progress)
    clock.lap("restore")
    return Result(
        done.model,
        plan,
        graph,
        Size.of(model, graph),
        Size.of(done.model, graph),
        tuple(_rows(plan, done)),
        how.name,
        chosen.name,
        mend,
        clock.laps,
    )


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    def skip(self) -> None:
        self._last = time.perf_counter()


def _check_prunable(graph: Graph) -> None:
    if not graph.units:
        reasons = "; ".join(f"{n}: {r}" for n, r in list(graph.left_alone.items())[:4])
        raise LbylError(f"nothing in this model can be pruned ({reasons or 'it has no layers'})")


def make_plan(
    model: nn.Module,
    graph: Graph,
    ratio: Ratio,
    criterion: Criterion,
    method: Method,
    round_to: int | None = None,
    statistics: Statistics | None = None,
) -> Plan:
    """Choose the channels that stay; nothing is cut."""
    weights = unit_weights(graph, model)
    wanted = counts(graph, ratio, round_to)
    kept = {}
    for name, count in wanted.items():
        if method.chooses:
            kept[name] = method.select(weights[name], count)
        else:
            kept[name] = criterion.select(weights[name], count, statistics)
    sizes = {unit.name: unit.channels for unit in graph.units}
    return Plan(kept, sizes, criterion.to_dict(), method.to_dict())


def _rows(plan: Plan, done: Restoration) -> Iterable[Row]:
    for name, kept in plan.kept.items():
        delivery = done.deliveries.get(name)
        if delivery is None:
            yield Row(name, plan.channels[name], len(kept), 0.0, 0.0, 0.0)
            continue
        found = errors(done.weights[name], kept, delivery.matrix)
        yield Row(name, plan.channels[name], len(kept), found.residual, found.bias, found.norm)
