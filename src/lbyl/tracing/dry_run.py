"""Verifies by a dry run that units can be cut as the graph describes.

Sizes written into a network's code (`x[:, :64]`, `view(b, 8, 32)`) do not show in one run. So the
network is cut for trial, on tensors without data, recorded once more, and the channels that are
traced then must be the kept ones. A unit for which that fails becomes unprunable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Axis, Graph, Unit
from lbyl.surgery.cut import cut, sliced, weightless_copy
from lbyl.surgery.indices import complete, kept_indices
from lbyl.surgery.refit import refit_attributes
from lbyl.torchkit.run import Inputs, one_thread
from lbyl.tracing.follow import follow
from lbyl.tracing.group import build, without
from lbyl.tracing.labels import FIXED, Flow
from lbyl.tracing.record import DoesNotRun, Record
from lbyl.tracing.rules import propagate

BAKED = "its size is written into the model's code"


def verify(model: nn.Module, inputs: Inputs, graph: Graph, fake: bool | None = None) -> Graph:
    """The graph less every unit that a trial cut shows cannot be cut.

    `fake` says whether the network runs on tensors without data, as its first recording showed.
    """
    while graph.units:
        try:
            bad = _refuted(model, inputs, graph, graph.units, fake)
        except DoesNotRun as error:
            bad = _blamed(model, inputs, graph, error.record, fake)
        if not bad:
            return graph
        graph = without(graph, dict.fromkeys(bad, BAKED))
    return graph


def _blamed(
    model: nn.Module, inputs: Inputs, graph: Graph, partial: Record, fake: bool | None
) -> set[str]:
    """Units to give up after a trial that failed: those whose channels the failing call read."""
    near = _suspects(graph, partial)
    if len(near) == 1:
        return {near[0].name}
    units = near or graph.units
    # Units that hold alone but not together: none can be trusted.
    return _culprits(model, inputs, graph, units, fake) or {unit.name for unit in units}


@one_thread()
def _suspects(graph: Graph, partial: Record) -> list[Unit]:
    """The units whose channels reached the call that failed."""
    flow = propagate(Flow(partial, grouped=_grouped(graph)))
    read = [torch.unique(flow.of(v)) for v in partial.failed if v not in partial.parameters]
    classes = flow.atoms.classes()
    if not read:
        return []
    seen = classes[torch.cat(read)]
    channels = [
        channel
        for axis, atoms in flow.atoms.axes.items()
        if bool(torch.isin(classes[atoms], seen[seen != FIXED]).any())
        and (channel := graph.axes.get(axis)) is not None
    ]
    if not channels:
        return []
    numbers = torch.cat(channels)
    hit = torch.zeros(max(u.range.stop for u in graph.units), dtype=torch.bool)
    hit[numbers[(numbers >= 0) & (numbers < len(hit))]] = True
    return [unit for unit in graph.units if bool(hit[unit.start : unit.range.stop].any())]


def _culprits(
    model: nn.Module, inputs: Inputs, graph: Graph, units: Sequence[Unit], fake: bool | None
) -> set[str]:
    """Halve until single units fail: few trials where few units are bad."""
    try:
        return _refuted(model, inputs, graph, units, fake)
    except DoesNotRun:
        if len(units) == 1:
            return {units[0].name}
    half = len(units) // 2
    return _culprits(model, inputs, graph, units[:half], fake) | _culprits(
        model, inputs, graph, units[half:], fake
    )


def _refuted(
    model: nn.Module, inputs: Inputs, graph: Graph, units: Sequence[Unit], fake: bool | None
) -> set[str]:
    """Units whose channels are not those kept once these are cut."""
    # Two channels of each layer: one alone looks like something that is there once for all.
    kept = {unit.name: complete(graph, unit, trial(unit), least=2) for unit in units}
    indices = kept_indices(graph, kept)
    if fake is False:  # what runs may depend on values, so the trial has real ones
        slim = cut(model, sliced(model, indices))
    else:
        slim = weightless_copy(model, indices)
        refit_attributes(slim, model)
    # What only training runs is heeded already: no unit is left of it.
    flow = follow(slim, inputs, fake, spare=True, grouped=_grouped(graph), training=False)
    return _different(graph, build(flow, residual=True, least=1), indices, units)


def _grouped(graph: Graph) -> set[str]:
    """Weights of grouped convolutions, which stay such even with a single group left."""
    return {c.weight for c in graph.layers if c.groups > 1}


def trial(unit: Unit) -> Tensor:
    """An irregular choice of kept channels: what only works by symmetry fails."""
    generator = torch.Generator().manual_seed(unit.channels)
    count = max(1, unit.channels * 2 // 3)
    return torch.randperm(unit.channels, generator=generator)[:count].sort().values


@one_thread()
def _different(
    graph: Graph, actual_graph: Graph, indices: dict[Axis, Tensor], units: Sequence[Unit]
) -> set[str]:
    """Units whose planned channels do not correspond one to one to those of the cut network."""
    highest = max(int(channel.max()) for channel in graph.axes.values())
    owner = torch.full((highest + 2,), -1)  # the last entry stands for "no channel"
    for i, unit in enumerate(units):
        owner[unit.start : unit.range.stop] = i
    wrong = torch.zeros(len(units) + 1, dtype=torch.bool)
    pairs: list[Tensor] = []
    for axis, channel in graph.axes.items():
        planned = channel[indices[axis]] if axis in indices else channel
        actual = actual_graph.axes.get(axis, torch.full_like(planned, -1))
        if len(planned) != len(actual):
            wrong[owner[planned]] = True
        else:
            tested = owner[planned] >= 0
            pairs.append(torch.stack([planned[tested], actual[tested]]))
    if pairs:
        a, b = torch.unique(torch.cat(pairs, dim=1), dim=1)
        wrong[owner[a[b < 0]]] = True
        for side in (a, b):  # a channel that meets two others
            values, counts = torch.unique(side, return_counts=True)
            wrong[owner[a[torch.isin(side, values[counts > 1])]]] = True
    return {unit.name for i, unit in enumerate(units) if wrong[i]}
