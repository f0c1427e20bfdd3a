"""Verifies by a dry run that units can be cut as the graph describes.

Sizes written into a network's code (`x[:, :64]`, `view(b, 8, 32)`) do not show in one run. So the
network is cut for trial, recorded once more, and the channels that are
traced then must be the kept ones. A unit for which that fails becomes unprunable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lbyl.graph.unit import Axis, Graph, Unit
from lbyl.runtime.run import Inputs
from lbyl.runtime.session import one_thread
from lbyl.surgery.cut import cut, sliced
from lbyl.surgery.indices import kept_indices
from lbyl.tracing.follow import follow
from lbyl.tracing.group import Grouping, without
from lbyl.tracing.labels import FIXED, Flow, constant_dropped, distinct
from lbyl.tracing.record import DoesNotRun, Record
from lbyl.tracing.rules import propagate
from lbyl.tracing.values import Exactness, some, widths

BAKED = "its size is written into the model's code"
COMPUTED_WITH = "the network computes with its width: cut, it gives something else"


def verify(
    model: nn.Module, inputs: Inputs, graph: Graph, before: Record, residual: bool = False
) -> Graph:
    """The graph less every unit that a trial cut shows cannot be cut.

    `before` is the record of the network as it is.
    """
    trials = Trials(model, inputs, graph, before, residual)
    while trials.graph.units:
        try:
            bad = trials.refuted(trials.graph.units)
        except DoesNotRun as error:
            bad = trials.blamed(error.record)
        if not bad:
            break
        trials.graph = without(trials.graph, dict.fromkeys(bad, BAKED))
    return computing_alike(model, inputs, trials.graph)


def computing_alike(model: nn.Module, inputs: Inputs, graph: Graph) -> Graph:
    """The graph less units whose width the network computes with, seen at two widths."""
    exactness = Exactness(model, inputs, graph)
    for kept in widths(graph, graph.units):
        kept = {name: kept[name] for name in exactness.graph.names}
        bad = exactness.wrong(kept)
        exactness.graph = without(exactness.graph, dict.fromkeys(bad, COMPUTED_WITH))
    return exactness.graph


@dataclass
class Trials:
    """Cuts a network for trial."""

    model: nn.Module
    inputs: Inputs
    graph: Graph
    before: Record  # of the network as it is
    residual: bool = False  # whether norms and tables may lose channels

    def blamed(self, partial: Record) -> set[str]:
        """Units to give up after a trial that failed: those whose channels the failing call read.

        Where several were read, trials tell; and all units are suspected where that finds none.
        """
        flow = self._followed(partial)
        sure = self._read_alone(flow, [*partial.overcome, partial.failed], self.graph.units)
        if sure:
            return sure
        near, units = self._suspects(flow, partial.failed), self.graph.units
        bad = (near and self._culprits(near)) or self._culprits(units)
        # Units that hold alone but not together: none can be trusted.
        return bad or {unit.name for unit in near or units}

    @one_thread()
    def _followed(self, partial: Record) -> Flow:
        return propagate(Flow(partial, grouped=_grouped(self.graph), residual=self.residual))

    @one_thread()
    def _suspects(self, flow: Flow, read: Sequence[int]) -> list[Unit]:
        """The units whose channels reached a call that failed, by the values that it read."""
        values = [v for v in read if v not in flow.record.parameters]
        if not values:
            return []
        classes = flow.atoms.classes()
        seen = torch.zeros(flow.atoms.count, dtype=torch.bool)
        for value in values:
            seen[classes[distinct(constant_dropped(flow.of(value)))]] = True
        seen[FIXED] = False
        read_along = flow.atoms.axes_with(seen[classes])
        channels = [self.graph.axes[axis] for axis in read_along if axis in self.graph.axes]
        if not channels:
            return []
        numbers = torch.cat(channels)
        hit = torch.zeros(max(u.range.stop for u in self.graph.units), dtype=torch.bool)
        hit[numbers[(numbers >= 0) & (numbers < len(hit))]] = True
        return [u for u in self.graph.units if bool(hit[u.start : u.range.stop].any())]

    def _read_alone(
        self, flow: Flow, reads: Sequence[Sequence[int]], units: Sequence[Unit]
    ) -> set[str]:
        """Those of the units that failed calls read while they read no other."""
        names = {unit.name for unit in units}
        found = [[u.name for u in self._suspects(flow, r) if u.name in names] for r in reads]
        return {near[0] for near in found if len(near) == 1}

    def _culprits(self, units: Sequence[Unit]) -> set[str]:
        """Halve until single units fail: few trials where few units are bad."""
        try:
            return self.refuted(units)
        except DoesNotRun:
            if len(units) == 1:
                return {units[0].name}
        half = len(units) // 2
        return self._culprits(units[:half]) | self._culprits(units[half:])

    def refuted(self, units: Sequence[Unit]) -> set[str]:
        """Units whose channels are not those kept once these are cut."""
        kept = {unit.name: some(self.graph, unit) for unit in units}
        indices = kept_indices(self.graph, kept)
        slim = cut(self.model, sliced(self.model, indices), parameters=False)
        # What only training runs is heeded already: no unit is left of it.
        grouped = _grouped(self.graph)
        flow = follow(
            slim,
            self.inputs,
            True,
            grouped,
            training=False,
            before=self.before,
            residual=self.residual,
        )
        if not flow.record.overcome:
            found = Grouping.of(flow)
            axes = found.axes(found.accepted(residual=True, least=1)[0])
            return _different(self.graph, axes, indices, units)
        sure = self._read_alone(flow, flow.record.overcome, units)
        if not sure:
            flow.record.failed = flow.record.overcome[0]
            raise DoesNotRun(self.inputs, RuntimeError("a trial cut fails"), flow.record)
        return sure


def _grouped(graph: Graph) -> set[str]:
    """Weights of grouped convolutions, which stay such even with a single group left."""
    return {c.weight for c in graph.layers if c.groups > 1}


@one_thread()
def _different(
    graph: Graph,
    actual_axes: Mapping[Axis, Tensor],
    indices: Mapping[Axis, Tensor],
    units: Sequence[Unit],
) -> set[str]:
    """Units whose planned channels do not correspond one to one to those of the cut network."""
    owner = torch.full((graph.numbers + 1,), -1)  # the last entry stands for "no channel"
    for i, unit in enumerate(units):
        owner[unit.start : unit.range.stop] = i
    wrong = torch.zeros(len(units) + 1, dtype=torch.bool)
    pairs: list[tuple[Tensor, Tensor]] = []
    for axis, channel in graph.axes.items():
        planned = channel[indices[axis]] if axis in indices else channel
        actual = actual_axes.get(axis)
        if actual is None:
            actual = torch.full_like(planned, -1)
        if len(planned) != len(actual):
            wrong[owner[planned]] = True
        else:
            pairs.append((planned, actual))
    if pairs:
        a, b = (torch.cat(side) for side in zip(*pairs))
        tested = owner[a] >= 0
        a, b = a[tested], b[tested]
        base = int(b.max()) + 2 if len(b) else 2
        codes = torch.unique(a * base + b + 1)  # a pair as one number, which is found faster
        a, b = codes // base, codes % base - 1
        wrong[owner[a[b < 0]]] = True
        for side in (a, b):  # a channel that meets two others
            values, counts = torch.unique(side, return_counts=True)
            wrong[owner[a[torch.isin(side, values[counts > 1])]]] = True
    return {unit.name for i, unit in enumerate(units) if wrong[i]}
