"""The one function: a model goes in, a smaller one with its accuracy put back comes out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.budget import Budget
from lbyl.channels import Axis
from lbyl.criteria import Criterion, criteria
from lbyl.errors import errors
from lbyl.exceptions import LbylError
from lbyl.pipeline import Progress, Restoration, restore
from lbyl.plan import Plan
from lbyl.ratios import Ratio, counts
from lbyl.record import Inputs
from lbyl.refine import check_steps, own_inputs
from lbyl.refine import refine as refine_slim
from lbyl.repair import check_repair
from lbyl.restore import Method, methods
from lbyl.result import Result, Row, Size
from lbyl.statistics import Statistics, collect
from lbyl.statistics.analytic import analytic_statistics
from lbyl.statistics.recalibrate import recalibrate
from lbyl.statistics.sequential import fit_sequentially
from lbyl.statistics.sources import Unseen
from lbyl.statistics.sources import calibration as calibration_passes
from lbyl.surgery import surviving_indices
from lbyl.trace import check_model, trace
from lbyl.unit import Graph
from lbyl.weights import unit_weights

DEFAULT_RATIO = 0.3


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
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    max_error: float | None = None,
    images: int | str | None = None,
    taps: str = "auto",
    sequential: bool = False,
    refine: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Remove a share of the filters of `model` and restore what they carried.

    The model given is never changed. `ratio` is the share of channels that go: one number, or
    patterns of layer names with a number each. `statistics` from an earlier `collect` saves
    running the network again; `calibration` gives unlabelled inputs of the user's own.

    Instead of a ratio a budget may be given: `macs`, `params` or `latency` as a share of the
    original's, or `max_error`, the largest predicted error of a layer. Ratios are then chosen
    layer by layer so that the predicted error is least.

    `sequential` (with `calibration`) fits each layer on what the pruned network really delivers to
    it, in the order they run; all calibration inputs then run at once.

    `refine` is a number of gradient steps in which the filters that stayed bend too, on procedural
    inputs or those of `calibration`: slower than everything else together, and better.
    """
    budget = Budget(macs, params, latency, max_error)
    budget.check(ratio)
    check_steps(refine)
    calibration = _repeatable(calibration, sequential)
    chosen, how = resolve(criterion, method)
    mend = how.default_repair if repair is None else repair
    check_repair(mend)
    clock = Clock()
    if graph is None:
        graph = trace(model, example_inputs, streams=streams, modules=modules, skip=skip)
    else:
        check_model(model)
    _check_prunable(graph)
    clock.lap("trace")
    wanted = how.needs_statistics or chosen.needs_statistics or mend != "none" or budget.given
    if statistics is None and wanted:
        options = {"images": images, "taps": taps, "seed": seed, "progress": progress}
        statistics = _statistics(model, example_inputs, graph, how, calibration, options)
        clock.laps.update(statistics.seconds)
        clock.skip()
    if statistics is not None:
        check_statistics(graph, statistics)
    if plan is None:
        if budget.given and statistics is not None:
            left = budget.counts(model, example_inputs, graph, statistics, round_to)
        else:
            left = counts(graph, DEFAULT_RATIO if ratio is None else ratio, round_to)
        plan = make_plan(model, graph, left, chosen, how, statistics)
    plan.check(graph)
    clock.lap("plan")
    done = restore(model, graph, plan, how, statistics, mend, progress)
    indices, unseen = surviving_indices(graph, plan.kept), Unseen(model, example_inputs, seed)
    if sequential:
        fit_in_order(model, done.model, graph, indices, calibration)
    elif mend == "network" and statistics is not None and statistics.source == "procedural":
        settle(model, done.model, graph, indices, unseen)
    clock.lap("restore")
    if refine:
        bend(model, done.model, graph, indices, refine, calibration, unseen, progress)
        clock.lap("refine")
    sizes = Size.of(model, graph), Size.of(done.model, graph)
    rows, names = tuple(_rows(plan, done)), (how.name, chosen.name, mend)
    return Result(done.model, plan, graph, *sizes, rows, *names, clock.laps, refine)


def _statistics(
    model: nn.Module,
    example_inputs: Inputs,
    graph: Graph,
    method: Method,
    calibration: Iterable[Any] | Tensor | None,
    options: dict[str, Any],
) -> Statistics:
    """From the weights where the method asks for that, otherwise by running the network."""
    if method.analytic and calibration is None:
        return analytic_statistics(model, graph)
    return collect(model, example_inputs, graph=graph, calibration=calibration, **options)


def _repeatable(calibration: Iterable[Any] | Tensor | None, sequential: bool) -> Any:
    """Calibration inputs that can be gone through again."""
    if calibration is None and sequential:
        raise LbylError("sequential=True needs calibration=: inputs of your own to fit on")
    if calibration is None or isinstance(calibration, (Tensor, list)):
        return calibration
    return list(calibration)


def fit_in_order(
    model: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    calibration: Any,
) -> None:
    """Refit the readers of the slim model on calibration inputs, one after the other."""
    batches = list(calibration_passes(model, calibration).batches)
    if not all(isinstance(batch, Tensor) for batch in batches):
        raise LbylError("sequential=True needs calibration inputs that are single tensors")
    fit_sequentially(model, slim, graph, indices, torch.cat(batches))


def settle(
    model: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    unseen: Unseen,
) -> None:
    """Run both networks once more for what repairs by layer cannot know (slim is changed)."""
    if graph.norms and indices:
        recalibrate(model, slim, graph, indices, unseen.few)


def bend(
    model: nn.Module,
    slim: nn.Module,
    graph: Graph,
    indices: Mapping[Axis, Tensor],
    steps: int,
    calibration: Iterable[Any] | Tensor | None,
    unseen: Unseen,
    progress: Progress | None,
) -> None:
    """Refine the slim model on procedural inputs, or on the user's own."""
    if calibration is None:
        inputs, settling = unseen.endless(), unseen.few
    else:
        inputs, settling = own_inputs(calibration_passes(model, calibration)), None
    refine_slim(model, slim, graph, indices, steps, inputs, settling, progress)


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


def resolve(criterion: str | Criterion, method: str | Method) -> tuple[Criterion, Method]:
    """Both by name or as they are; one given in the other's place is told apart."""
    chosen, how = criteria.resolve(criterion), methods.resolve(method)
    if not isinstance(chosen, Criterion):
        raise LbylError(f"{chosen!r} is no criterion; the known ones are {criteria.names()}")
    if not isinstance(how, Method):
        raise LbylError(f"{how!r} is no method; the known ones are {methods.names()}")
    return chosen, how


def check_statistics(graph: Graph, statistics: Statistics) -> None:
    """One clear error for statistics that were collected on another network."""
    found = {c.name: statistics.get(c.name) for c in graph.consumers.values()}
    if statistics.moments and not any(found.values()):
        raise LbylError("the statistics belong to another model: they know none of its layers")
    for name, moments in found.items():
        if moments is None:
            continue
        consumer = graph.consumers[name]
        shape = graph.shapes[consumer.weight]
        inputs = shape[consumer.axis]
        taps = math.prod(shape) // (inputs * shape[consumer.output_axis])
        measured = len(moments.mean) if moments.columns is None else moments.columns.numel()
        if measured != inputs or moments.taps not in (1, taps):
            raise LbylError(
                f"the statistics belong to another model: {name} reads {inputs} inputs at {taps} "
                f"taps, they were collected over {measured} at {moments.taps}"
            )


def _check_prunable(graph: Graph) -> None:
    if not graph.units:
        reasons = "; ".join(f"{n}: {r}" for n, r in list(graph.left_alone.items())[:4])
        raise LbylError(f"nothing in this model can be pruned ({reasons or 'it has no layers'})")


def make_plan(
    model: nn.Module,
    graph: Graph,
    wanted: Mapping[str, int],
    criterion: Criterion,
    method: Method,
    statistics: Statistics | None = None,
) -> Plan:
    """Choose the channels that stay, `wanted` of each unit; nothing is cut."""
    weights = unit_weights(graph, model)
    kept = {}
    for name, count in wanted.items():
        unit = weights.pop(name)  # so that what it reads in float64 is freed before the next
        if method.chooses:
            kept[name] = method.select(unit, count)
        else:
            kept[name] = criterion.select(unit, count, statistics)
    sizes = {unit.name: unit.channels for unit in graph.units}
    return Plan(kept, sizes, criterion.to_dict(), method.to_dict())


def _rows(plan: Plan, done: Restoration) -> Iterable[Row]:
    for name, kept in plan.kept.items():
        delivery = done.deliveries.get(name)
        if delivery is None:
            yield Row(name, plan.channels[name], len(kept), 0.0, 0.0, 0.0)
            continue
        found = errors(done.weights.pop(name), kept, delivery.matrix)
        yield Row(name, plan.channels[name], len(kept), found.residual, found.bias, found.norm)
