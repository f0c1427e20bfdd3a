"""Which indices of which parameter axes are kept, given the kept channels of every unit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lbyl.graph.unit import Axis, Consumer, Graph, Unit
from lbyl.runtime.tensors import onto

Kept = Mapping[str, Tensor]
"""Unit name → indices of the kept channels, ascending."""


def kept_mask(graph: Graph, kept: Kept) -> Tensor:
    """A flag for every channel of the network: is it kept? The last stands for "no channel"."""
    mask = torch.ones(graph.numbers + 1, dtype=torch.bool)
    for name, indices in kept.items():
        unit = graph[name]
        mask[unit.start : unit.range.stop] = False
        mask[unit.start + indices] = True
    return mask


def kept_indices(graph: Graph, kept: Kept) -> dict[Axis, Tensor]:
    """For every parameter axis that loses indices those that are kept."""
    mask = kept_mask(graph, kept)
    indices: dict[Axis, Tensor] = {}
    for axis, channel in graph.axes.items():
        kept_here = kept_along(channel, mask).numpy()  # which looks at small ones much faster
        if not kept_here.all():
            indices[axis] = torch.from_numpy(kept_here.nonzero()[0])
    return indices


def kept_along(channel: Tensor, mask: Tensor) -> Tensor:
    """Flags along an axis whose indices belong to these channels (−1: none, so kept)."""
    kept = mask[channel]  # −1 is the last, which is always kept
    return kept if channel.dim() == 1 else kept.all(1)


def indices_on(indices: Mapping[Axis, Tensor], device: torch.device) -> dict[Axis, Tensor]:
    """The same on a device, moved there together."""
    if device.type == "cpu" or not indices:
        return dict(indices)
    moved = onto(torch.cat(list(indices.values())), device)
    return dict(zip(indices, moved.split([len(kept) for kept in indices.values()])))


def consumers_cut(graph: Graph, indices: Mapping[Axis, Tensor]) -> list[Consumer]:
    """The consumers that lose inputs."""
    return [c for c in graph.consumers.values() if (c.weight, c.axis) in indices]


def take(tensor: Tensor, name: str, indices: Mapping[Axis, Tensor]) -> Tensor:
    """A parameter without the pruned channels, along all its axes."""
    for axis in range(tensor.dim()):
        if (name, axis) in indices:
            tensor = tensor.index_select(axis, onto(indices[name, axis], tensor.device))
    return tensor


def pruned_of(channels: int, kept: Tensor) -> Tensor:
    """The pruned channels, ascending."""
    mask = torch.ones(channels, dtype=torch.bool)
    mask[kept] = False
    return torch.nonzero(mask).reshape(-1)


def complete(
    graph: Graph, unit: Unit, kept: Tensor, worth: Tensor | None = None, least: int = 1
) -> Tensor:
    """Kept channels of a unit, some exchanged so that every layer keeps `least` of those it needs.

    Of the channels that a layer needs the one of most `worth` comes in, for the one of least that
    no layer needs; where every kept one is needed there is one more.
    """
    parts = sorted(graph.parts.get(unit.name, {}).values(), key=len)  # small ones may serve others
    mask = torch.zeros(unit.channels, dtype=torch.bool)
    mask[kept] = True
    members = torch.zeros(len(parts), unit.channels, dtype=torch.bool)
    for row, part in zip(members, parts):
        row[part] = True
    worth = torch.zeros(unit.channels) if worth is None else worth.cpu()
    for part in parts:
        while int(mask[part].sum()) < min(least, len(part)):
            lacking = part[~mask[part]]
            mask[lacking[worth[lacking].argmax()]] = True
            needed = members[(members & mask).sum(1) <= least].any(0)
            spare = torch.nonzero(mask & ~needed).reshape(-1)
            if len(spare):
                mask[spare[worth[spare].argmin()]] = False
    return torch.nonzero(mask).reshape(-1)
