"""Proof by a dry run that units can be cut as the graph says.

Sizes written into a network's code (`x[:, :64]`, `view(b, 8, 32)`) do not show in one run. So the
network is cut for trial, on tensors without data, recorded once more, and the channels found then
must be the channels kept. A unit for which that fails is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lbyl.channels import Axis, Flow
from lbyl.exceptions import LbylError
from lbyl.record import Inputs, record
from lbyl.rules import propagate
from lbyl.surgery import refit_attributes, surviving_indices, tensors
from lbyl.trace import build, without
from lbyl.unit import Graph, Unit

BAKED = "its size is written into the model's code"


def prove(model: nn.Module, inputs: Inputs, graph: Graph) -> Graph:
    """The graph less every unit that a trial cut shows cannot be cut."""
    if not graph.units or _holds(model, inputs, graph, graph.units):
        return graph
    bad = _culprits(model, inputs, graph, graph.units)
    graph = without(graph, dict.fromkeys(bad, BAKED))
    if graph.units and not _holds(model, inputs, graph, graph.units):
        # Units that hold alone but not together: none can be trusted.
        graph = without(graph, dict.fromkeys(graph.names, BAKED))
    return graph


def _culprits(model: nn.Module, inputs: Inputs, graph: Graph, units: Sequence[Unit]) -> list[str]:
    """Halve until single units fail: few trials where few units are bad."""
    if _holds(model, inputs, graph, units):
        return []
    if len(units) == 1:
        return [units[0].name]
    middle = len(units) // 2
    return _culprits(model, inputs, graph, units[:middle]) + _culprits(
        model, inputs, graph, units[middle:]
    )


def _holds(model: nn.Module, inputs: Inputs, graph: Graph, units: Sequence[Unit]) -> bool:
    """Whether the network cut at these units has just the channels that were kept."""
    kept = {unit.name: trial(unit) for unit in units}
    indices = surviving_indices(graph, kept)
    slim = weightless_copy(model, indices)
    refit_attributes(slim, model)
    try:
        flow = propagate(Flow(record(slim, inputs)))
    except LbylError:
        return False
    found = build(flow, streams=True)
    return _same(graph, found, indices, units)


def trial(unit: Unit) -> Tensor:
    """An irregular choice of kept channels: what only works by symmetry fails."""
    generator = torch.Generator().manual_seed(unit.channels)
    count = max(1, unit.channels * 2 // 3)
    return torch.randperm(unit.channels, generator=generator)[:count].sort().values


def weightless_copy(model: nn.Module, indices: Mapping[Axis, Tensor]) -> nn.Module:
    """The cut network with a single zero behind each parameter: shapes without memory."""
    memo: dict[int, object] = {}
    for name, tensor in tensors(model).items():
        shape = [
            len(indices[name, axis]) if (name, axis) in indices else size
            for axis, size in enumerate(tensor.shape)
        ]
        empty = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(shape)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _same(
    graph: Graph, found: Graph, indices: dict[tuple[str, int], Tensor], units: Sequence[Unit]
) -> bool:
    """Channels of the cut network and of the plan must correspond one to one."""
    tested = torch.zeros(max((u.range.stop for u in graph.units), default=0), dtype=torch.bool)
    for unit in units:
        tested[unit.start : unit.range.stop] = True
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for axis, channel in graph.axes.items():
        planned = channel[indices[axis]] if axis in indices else channel
        actual = found.axes.get(axis, torch.full_like(planned, -1))
        if len(planned) != len(actual):
            return False
        for a, b in zip(planned.tolist(), actual.tolist()):
            if (
                0 <= a < len(tested)
                and tested[a]
                and (b < 0 or there.setdefault(a, b) != b or back.setdefault(b, a) != a)
            ):
                return False
    return True
