"""From a plan to new weights: deliver, rewrite the consumers, correct, slice."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.unit import Axis, Consumer, Graph, Unit
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.methods.base import Delivery, Method, identity_rows
from lbyl.planning.plan import Plan
from lbyl.restoring.correct import as_held, is_rescaled
from lbyl.restoring.logits import rewritten_products
from lbyl.restoring.norms import corrected_norms
from lbyl.restoring.solving import (
    Request,
    Solution,
    Solver,
    all_finite,
    floating,
    silenced,
)
from lbyl.runtime.notes import at, note
from lbyl.runtime.parallel import each
from lbyl.runtime.processes import gathered, several, share
from lbyl.runtime.run import Progress
from lbyl.runtime.tensors import finite_each, places
from lbyl.statistics.moments import Statistics
from lbyl.surgery.cut import cut, sliced
from lbyl.surgery.indices import consumers_cut, kept_along, kept_indices, kept_mask, take
from lbyl.surgery.layout import head_attributes, layouts


@dataclass(frozen=True)
class Written:
    """What was written into one consumer."""

    error: float | None = None  # of its output on the statistics, relative to its variance
    mean: bool = False  # put back
    variance: bool = False


@dataclass(frozen=True)
class Restoration:
    """The slim model, and what was written into it."""

    model: nn.Module
    deliveries: dict[str, Delivery]  # unit → what was delivered, where one matrix describes it
    consumers: dict[str, Written]
    products: dict[str, float] = field(default_factory=dict)  # unit → error of its logits

    def error_of(self, unit: Unit) -> float | None:
        """The largest error at the outputs of a unit's consumers, None where none was measured."""
        errors = [self.consumers[c].error for c in unit.consumers if c in self.consumers]
        errors += [self.products.get(unit.name)]
        return max((e for e in errors if e is not None), default=None)


def restore(
    model: nn.Module,
    graph: Graph,
    plan: Plan,
    method: Method,
    statistics: Statistics | None,
    progress: Progress | None = None,
    solver: Solver | None = None,
) -> Restoration:
    """Cut a copy of `model` as planned and write what was pruned into its consumers.

    A consumer whose new weight cannot be computed is only cut, and a fallback is noted. A `solver`
    of the same network, method and statistics may know some of them already.
    """
    solver = solver or Solver(model, graph, method, statistics)
    weights = unit_weights(graph, model, solver.state)
    kept = plan.pruned
    wanted = [
        n
        for n in kept
        if graph[n].consumers and (method.by_unit or not _all_measured(graph[n], statistics))
    ]
    deliveries = deliver_all(method, {n: (weights[n], kept[n]) for n in wanted}, statistics)
    indices = kept_indices(graph, kept)
    mask = kept_mask(graph, kept)
    values: dict[str, Tensor] = {}
    attributes = {}
    if any(graph[n].attention is not None for n in kept):
        values |= layouts(graph, kept)
        attributes = head_attributes(model, graph, kept)
    channel_cut = ChannelCut(graph, kept, deliveries, mask)
    state = solver.state
    merged = as_held(channel_cut.merged(state), state)
    if not all_finite(merged):
        note("no channels are merged: mixtures are too large for the model's precision")
        deliveries = {n: _nothing(weights[n], k) for n, k in kept.items() if n in deliveries}
        channel_cut, merged = replace(channel_cut, deliveries=deliveries), {}
    values |= merged | as_held(corrected_norms(graph, indices, state, statistics), state)
    products = {}
    if method.restores_products and statistics is not None:
        products = _products(graph, kept, statistics, state, indices, values)
    solved, written = _solved(solver, channel_cut, indices, progress)
    values |= solved
    values |= sliced(model, indices, but=values)
    # Of units whose consumers are all solved on their own the matrix by channel is not written.
    reported = deliveries if method.by_unit else {}
    slim = cut(model, values, attributes)
    return Restoration(slim, reported, written, products)


def _solved(
    solver: Solver,
    channel_cut: ChannelCut,
    indices: Mapping[Axis, Tensor],
    progress: Progress | None,
) -> tuple[dict[str, Tensor], dict[str, Written]]:
    """New values around all consumers that lose inputs, and what is reported of each."""
    graph, state, mask = channel_cut.graph, solver.state, channel_cut.mask
    deliveries, kept = channel_cut.deliveries, channel_cut.kept
    solved: dict[str, Tensor] = {}
    cut_consumers = consumers_cut(graph, indices)
    # A table's weight stays: what its consumer takes over would change the table as well.
    written = {c.name: Written() for c in cut_consumers if c.weight in graph.tables}
    mine = [(step, c) for step, c in share(cut_consumers) if c.weight not in graph.tables]
    requests = {c.name: Request(c, kept_along(c.channel, mask), deliveries, kept) for _, c in mine}
    solver.solve(requests.values())
    solutions = {name: solver(request) for name, request in requests.items()}
    new = {
        c.name: as_held(channel_cut.outputs(solutions[c.name].values, c), state) for _, c in mine
    }
    finite = dict(zip(new, finite_each([floating(held) for held in new.values()])))
    for step, consumer in mine:
        if finite[consumer.name]:
            solved |= new[consumer.name]
            written[consumer.name] = _told(consumer, solutions[consumer.name], solver)
        else:  # a weight and the correction behind it belong together
            with at(consumer.name):
                note("only cut: its new values are too large for the model's precision")
            weight = state[consumer.weight].detach()
            solved[consumer.weight] = take(weight, consumer.weight, indices)
            written[consumer.name] = Written()
        if progress:
            progress("solving", step + 1, len(cut_consumers))
    return _from_all(solved, written, cut_consumers)


def _from_all(
    solved: dict[str, Tensor], written: dict[str, Written], order: Sequence[Consumer]
) -> tuple[dict[str, Tensor], dict[str, Written]]:
    """What all processes have solved, each its share of the consumers."""
    if not several():
        return solved, written
    everything: dict[str, Tensor] = {}
    told: dict[str, Written] = {}
    for values, parts in gathered(({n: v.cpu() for n, v in solved.items()}, written)):
        everything |= values
        told |= parts
    everything |= solved  # on the device already
    return everything, {consumer.name: told[consumer.name] for consumer in order}


def _products(
    graph: Graph,
    kept: Mapping[str, Tensor],
    statistics: Statistics,
    state: Mapping[str, Tensor],
    indices: Mapping[Axis, Tensor],
    values: dict[str, Tensor],
) -> dict[str, float]:
    """Write queries and keys of fewer channels into `values`; unit → error of its logits."""
    errors: dict[str, float] = {}
    full: dict[str, Tensor] = {}
    for name, indices_kept in kept.items():
        moments = statistics.products.get(name)
        if moments is None:  # not of queries and keys, or not seen
            continue
        with at(name):
            changed = {**state, **full}
            new, errors[name] = rewritten_products(
                graph, graph[name], indices_kept, moments, changed
            )
        full |= new
    for name, value in full.items():
        values[name] = take(value, name, indices).to(state[name].dtype)
    return errors


def silencing(
    graph: Graph, plans: Sequence[Plan], solver: Solver
) -> list[dict[str, Tensor] | None]:
    """Values, in full size, under which a network computes what each cut network would.

    Pruned channels are still made, but nobody reads them. Cheaper than to cut where little changes.
    None where only a cut network can tell: kept channels become mixtures, a bias is added, or no
    layer reads them.
    """
    asked = solve_ahead(graph, plans, solver)
    return [None if requests is None else _silenced(requests, solver) for requests in asked]


def solve_ahead(graph: Graph, plans: Sequence[Plan], solver: Solver) -> list[list[Request] | None]:
    """Solve the consumers of several plans in one go; what was asked for each of them."""
    asked = [_silencing_requests(graph, plan, solver) for plan in plans]
    solver.solve([request for requests in asked for request in requests or ()])
    return asked


def _silenced(requests: Sequence[Request], solver: Solver) -> dict[str, Tensor] | None:
    values: dict[str, Tensor] = {}
    for request in requests:
        solution, consumer = solver.shared(request), request.consumer
        if not solution.finite or not solution.values.keys() <= solver.state.keys():
            return None
        like = solver.state[consumer.weight].detach()
        full = silenced(solution, consumer, request.columns, like)
        values |= {**solution.values, consumer.weight: full}
    return values


def _silencing_requests(graph: Graph, plan: Plan, solver: Solver) -> list[Request] | None:
    """The consumers that read what a plan prunes; None where they do not tell everything."""
    method = solver.method
    kept = plan.pruned
    if method.by_unit or any(graph[n].kind == "qk" for n in kept):
        return None
    if graph.channel_norms and any(graph[n].residual for n in kept):
        return None
    unmeasured = [n for n in kept if not _all_measured(graph[n], solver.statistics)]
    weights = unit_weights(graph, solver.model, solver.state) if unmeasured else {}
    wanted = {n: (weights[n], kept[n]) for n in unmeasured}
    deliveries = deliver_all(method, wanted, solver.statistics)
    mask = kept_mask(graph, kept)
    names = dict.fromkeys(c for n in kept for c in graph[n].consumers)
    consumers = [graph.consumers[name] for name in names]
    return [Request(c, kept_along(c.channel, mask), deliveries, kept) for c in consumers]


def deliver_all(
    method: Method,
    units: Mapping[str, tuple[UnitWeights, Tensor]],
    statistics: Statistics | None,
) -> dict[str, Delivery]:
    """A method's deliveries of several units, each given with its kept channels."""

    def deliver(unit: tuple[UnitWeights, Tensor]) -> Delivery:
        with at(unit[0].unit.name):
            return method.deliver(*unit, statistics)

    if not units:
        return {}
    device = next(iter(units.values()))[0].device
    if not method.in_threads:
        made = {name: deliver(unit) for name, unit in units.items()}
    elif device.type == "cpu":
        made = dict(zip(units, each(deliver, list(units.values()), device)))
    else:
        made = _delivered_together(method, units, statistics)
    parts = [[x for x in (d.matrix, d.merge, d.gain) if x is not None] for d in made.values()]
    for name, finite in zip(list(made), finite_each(parts)):
        if not finite:
            with at(name):
                note("nothing is delivered: what was computed is not finite")
            made[name] = _nothing(*units[name])
    return made


def _delivered_together(
    method: Method,
    units: Mapping[str, tuple[UnitWeights, Tensor]],
    statistics: Statistics | None,
) -> dict[str, Delivery]:
    """Units that are alike in one go: single ones do not fill a device."""
    groups: dict[Hashable, list[str]] = {}
    for name, unit in units.items():
        groups.setdefault((method.alike(*unit), unit[0].device), []).append(name)
    made: dict[str, Delivery] = {}
    for names in groups.values():
        with at(names[0]):
            some = method.deliver_alike([units[name] for name in names], statistics)
        made |= dict(zip(names, some))
    return {name: made[name] for name in units}


def _nothing(weights: UnitWeights, kept: Tensor) -> Delivery:
    """A delivery of nothing: kept channels are themselves."""
    like = weights.state[weights.unit.producers[0].weight]
    return Delivery(identity_rows(weights.unit.channels, kept, like))


def _told(consumer: Consumer, solution: Solution, solver: Solver) -> Written:
    """What is reported of a consumer whose values were changed."""
    error = solution.error
    error = error if error is not None and math.isfinite(error) else None
    centred = len(solution.values) > 1
    varied = centred and is_rescaled(consumer, solver.graph, solver.method.correction)
    if consumer.norm is not None:
        varied = consumer.norm.var in solution.values
    return Written(error, centred, varied)


def _all_measured(unit: Unit, statistics: Statistics | None) -> bool:
    return statistics is not None and all(c in statistics.moments for c in unit.consumers)


@dataclass(frozen=True)
class ChannelCut:
    """Applies a plan along an axis: channels are pruned, kept, or become mixtures."""

    graph: Graph
    kept: dict[str, Tensor]
    deliveries: dict[str, Delivery]
    mask: Tensor  # for every channel of the network: is it kept?

    def outputs(self, changed: dict[str, Tensor], consumer: Consumer) -> dict[str, Tensor]:
        """New values of a consumer, in full output size, less the outputs it loses itself."""
        channel = self.graph.axes.get((consumer.weight, consumer.output_axis))
        if channel is None:
            return changed
        axes = {name: consumer.output_axis if name == consumer.weight else 0 for name in changed}
        first = consumer.weight, consumer.output_axis
        return {n: self.along(value, n, axes[n], channel, first) for n, value in changed.items()}

    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Producers and everything channel-wise of units whose kept channels become mixtures.

        Input columns of consumers are not cut here: each is rewritten on its own afterwards.
        """
        consumed = {(c.weight, c.axis) for c in self.graph.consumers.values()}
        axes = {axis: c for axis, c in self.graph.axes.items() if axis not in consumed}
        mixed = {axis[0] for axis in axes if self._mixing_along(axis)}
        values: dict[str, Tensor] = {}
        for (name, axis), channel in axes.items():
            if name in mixed:
                old = values.get(name, state[name].detach())
                if not (old.is_floating_point() or old.is_complex()):
                    raise LbylError(
                        f"{name} holds integers, which cannot be averaged: take a method that "
                        "does not merge channels, or leave its layer out with exclude="
                    )
                exact = old.to(torch.promote_types(old.dtype, torch.float64))  # complex stays so
                values[name] = self.along(exact, name, axis, channel)
        return values

    def along(
        self, tensor: Tensor, name: str, axis: int, channel: Tensor, known: Axis | None = None
    ) -> Tensor:
        """A parameter cut along one axis, whose indices belong to these channels.

        They are those of `known`, an axis of the graph, where it is not one itself.
        """
        kept_here = kept_along(channel, self.mask)
        new = tensor.index_select(axis, places(kept_here, tensor.device))
        position = torch.cumsum(kept_here, 0) - 1  # where a kept index lies afterwards
        for unit in self._mixing_along(known or (name, axis)):
            indices, delivery = self.kept[unit.name].cpu(), self.deliveries[unit.name]
            assert delivery.merge is not None
            rows = _rows_of(channel, unit)
            mixed = _mix(tensor, axis, rows, delivery.merge)
            if delivery.gain is not None and name in _scales(self.graph, unit):
                mixed = mixed * delivery.gain.to(mixed).reshape(-1, *[1] * (mixed.dim() - 1))
            into = position[rows[indices].flatten()].to(new.device)
            new = new.index_copy(axis, into, mixed.flatten(0, 1).movedim(0, axis).to(new))
        return new

    def _mixing_along(self, axis: Axis) -> list[Unit]:
        """Units along an axis whose kept channels become mixtures."""
        units = self.graph.units_of.get(axis, ()) if self._merges else ()
        return [u for u in units if u.name in self._merges]

    @cached_property
    def _merges(self) -> set[str]:
        return {name for name, d in self.deliveries.items() if d.merge is not None}


def _rows_of(channel: Tensor, unit: Unit) -> Tensor:
    """(m, r): the indices along an axis that belong to each channel of a unit."""
    counts = unit.slice_counts(channel)
    if bool((counts != counts[0]).any()):
        raise LbylError(f"the channels of {unit.name} cannot be merged: they differ in size")
    return unit.positions(channel).reshape(unit.channels, -1)


def _scales(graph: Graph, unit: Unit) -> set[str | None]:
    """Scales of the BatchNorms that see the unit's filters first."""
    first = {p.norm.weight for p in unit.producers if p.norm is not None}
    return first or {norm.weight for norm in graph.norms}


def _mix(tensor: Tensor, axis: int, rows: Tensor, merge: Tensor) -> Tensor:
    """Slices along an axis as mixtures of a unit's channels: (kept, slices each, rest)."""
    block = tensor.index_select(axis, rows.flatten().to(tensor.device)).movedim(axis, 0)
    return torch.tensordot(merge.to(tensor), block.unflatten(0, rows.shape), ([1], [0]))
