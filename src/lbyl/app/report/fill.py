"""Everything the report can show that a result does not hold by itself."""

from __future__ import annotations

import base64
import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.api import Prepared
from lbyl.app.report.heatmap import pack
from lbyl.graph.weights import unit_weights
from lbyl.inputs.images.preview import preview
from lbyl.methods import Method, registry
from lbyl.planning import criteria
from lbyl.planning.criteria import Criterion
from lbyl.planning.plan import Plan
from lbyl.planning.task import Task
from lbyl.restoring.rewrite import restore
from lbyl.result import Result
from lbyl.runtime.run import Inputs
from lbyl.statistics.moments import Statistics

ASKED = 8  # units of which it is asked how much they hurt alone
NEXT = 0.9  # of the channels that stay, after a further step
SHOWN, LARGEST = 25, 64  # inputs that are drawn, a square of them, and their side in pixels
COMPARED = ("none", "neuron-merging", "lbyl", "echo")
"""The methods that are shown side by side unless others are named."""


Part = Callable[[], dict[str, Any]]
"""One part of what a report shows: computes some arguments of `write_report`."""


def gather(
    prepared: Prepared, result: Result, methods: Sequence[str | Method] = COMPARED
) -> dict[str, Any]:
    """Arguments for `write_report`: errors of other methods under the same plan, and deliveries.

    They are plain data, which can be kept as JSON to write the same report again.

    `prepared` is the original network that `result` was made from. Where a method needs statistics
    they are collected, unless they have been; the errors of all methods are then told on them.
    """
    return together(part() for part in parts(prepared, result, methods).values())


def together(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All arguments of `write_report` that parts have found; what no part found is empty."""
    shown: dict[str, Any] = {"delivery": {}, "inputs": None, "alone": {}, "further": None}
    errors: dict[str, Any] = {}
    for part in found:
        errors |= part.get("errors", {})
        shown |= {key: value for key, value in part.items() if key != "errors"}
    order = {name: place for place, name in enumerate(COMPARED)}
    named = sorted(errors, key=lambda name: order.get(name, len(order)))
    return {"errors": {name: errors[name] for name in named}, **shown}


def parts(
    prepared: Prepared, result: Result, methods: Sequence[str | Method] = COMPARED
) -> dict[str, Part]:
    """Name of a part → what computes it, in the order in which they are worth their time."""
    own = registry.resolve(dict(result.method))
    # What was done is shown as it was done, not as a method of that name would do by default.
    by_name = {m.name: m for m in map(registry.resolve, methods) if m.name != own.name}
    tasks = {name: Task.of(result.plan, None, m, None) for name, m in by_name.items()}
    mine = Task.of(result.plan, None, own, None)
    common = cache(lambda: common_statistics(prepared, [*tasks.values(), mine]))
    found: dict[str, Part] = {
        "inputs": lambda: {"inputs": drawn_inputs(prepared)},
        f"delivery and errors of {own.name}": lambda: _of_own(prepared, result, mine, common()),
        "next step": lambda: {"further": next_step(prepared, result, own)},
    }
    for task in tasks.values():
        of_other = partial(_of_other, prepared, result.plan, task, common)
        found[f"errors of {task.method.name}"] = of_other
    return found | {"which layers hurt most": lambda: {"alone": harm(prepared, result, own)}}


def _of_own(
    prepared: Prepared, result: Result, task: Task, common: Statistics | None
) -> dict[str, Any]:
    """Deliveries and errors of the method that made the result."""
    known, pruned = prepared.needed(task) or common, result.plan.pruned
    matrices = _matrices(prepared, task.method, pruned, known)
    told = {row.unit: row.error for row in result.rows} if known is common else {}
    rows = _rows(pruned, told)
    delivery = {unit: pack(unit, matrix) for unit, matrix in matrices.items()}
    return {"errors": {task.method.name: rows}, "delivery": delivery}


def _of_other(
    prepared: Prepared, plan: Plan, task: Task, shared: Callable[[], Statistics | None]
) -> dict[str, Any]:
    """Errors of another method under the same plan."""
    common = shared()
    told = consumer_errors(prepared, plan, task.method, common)
    rows = _rows(plan.pruned, told)
    return {"errors": {task.method.name: rows}}


def harm(prepared: Prepared, result: Result, method: Method) -> dict[str, float]:
    """Unit → divergence where it alone is pruned; empty where that cannot be asked.

    Each costs a network, so only those are asked whose consumers err most.
    """
    erring = sorted(result.rows, key=lambda row: -(row.error or 0.0))
    try:
        return prepared.alone(result.plan, method, [row.unit for row in erring[:ASKED]])
    except Exception:  # as the forecast: no inputs can be drawn, or outputs are not comparable
        return {}


def next_step(prepared: Prepared, result: Result, method: Method) -> dict[str, Any] | None:
    """What comes of pruning a further tenth of the channels that stay, by the same criterion.

    None where that cannot be asked.
    """
    ratios = {row.unit: 1 - NEXT * row.kept / row.channels for row in result.rows}
    try:
        further = prepared.compress(ratios, criterion=_criterion(result), method=method)
    except Exception:  # nothing is left to prune, or the plan was the user's own
        return None
    told = further.forecast
    return {
        "fraction": 1 - NEXT,
        "parameters": further.after.parameters,
        "macs": further.after.macs,
        "kept": None if told is None else told.kept,
        "agreement": None if told is None else told.agreement,
    }


def _criterion(result: Result) -> Criterion | None:
    return None if result.criterion is None else criteria.resolve(dict(result.criterion))


def drawn_inputs(prepared: Prepared) -> str | None:
    """Some of the inputs that networks were compared on, as a picture in base64.

    None where inputs are no images, are the user's own, or no picture can be written.
    """
    if prepared.own is not None or not importlib.util.find_spec("PIL"):
        return None
    try:
        images = _some_images(prepared.fresh.forecasting())
    except Exception:  # as the forecast, which says so itself
        return None
    if images is None or images.dim() != 4 or images.shape[1] > 4:
        return None
    side = max(images.shape[-2:])
    few = images.float()
    if side > LARGEST:
        few = nn.functional.interpolate(few, scale_factor=LARGEST / side, mode="area")
    with tempfile.TemporaryDirectory() as folder:
        path = preview(Path(folder) / "inputs.png", SHOWN, images=few)
        return base64.b64encode(path.read_bytes()).decode("ascii")


def _some_images(batches: Sequence[Inputs]) -> Tensor | None:
    """The first that are shown; None where inputs are not one tensor."""
    found: list[Tensor] = []
    for batch in batches:
        if not isinstance(batch, Tensor):
            return None
        found.append(batch)
        if sum(map(len, found)) >= SHOWN:
            break
    return torch.cat(found)[:SHOWN]


def common_statistics(prepared: Prepared, tasks: Sequence[Task]) -> Statistics | None:
    """The statistics on which the errors of several tasks can be compared.

    They come from running the network, not from its weights; None where no task needs any.
    """
    needed = (prepared.needed(task) for task in tasks)
    return next((s for s in needed if s is not None and s.source != "analytic"), None)


def consumer_errors(
    prepared: Prepared, plan: Plan, method: Method, statistics: Statistics | None
) -> dict[str, float | None]:
    """Unit → the error at its consumers' outputs under a method; empty without statistics.

    Also empty for methods whose errors these statistics do not tell: those that go by statistics
    of another kind, and those that change kept channels, of which the moments are not known.
    """
    own = prepared.needed(Task.of(plan, None, method, None))
    if statistics is None or (own is not None and own is not statistics):
        return {}
    restored = restore(prepared.model, prepared.graph, plan, method, statistics)
    if any(delivery.merge is not None for delivery in restored.deliveries.values()):
        return {}
    return {unit: restored.error_of(prepared.graph[unit]) for unit in plan.pruned}


def _matrices(
    prepared: Prepared,
    method: Method,
    pruned: Mapping[str, Tensor],
    statistics: Statistics | None,
) -> dict[str, Tensor]:
    """Unit → delivery matrix (channels × kept)."""
    weights = unit_weights(prepared.graph, prepared.model)
    with torch.no_grad():
        return {
            name: method.deliver(weights[name], kept, statistics).matrix
            for name, kept in pruned.items()
        }


def _rows(
    units: Iterable[str], errors: Mapping[str, float | None]
) -> list[dict[str, str | float | None]]:
    """What a method misses in every unit."""
    return [{"unit": name, "error": errors.get(name)} for name in units]
