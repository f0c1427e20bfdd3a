"""Which indices of which parameter axes are kept, given the kept channels of every unit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lbyl.graph.unit import Axis, Consumer, Graph

Kept = Mapping[str, Tensor]
"""Unit name → indices of the kept channels, ascending."""


def kept_mask(graph: Graph, kept: Kept) -> Tensor:
    """A flag for every channel of the network: is it kept?"""
    count = max((int(index.max()) for index in graph.axes.values()), default=-1) + 1
    mask = torch.ones(count, dtype=torch.bool)
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
        kept_here = kept_along(channel, mask)
        if not bool(kept_here.all()):
            indices[axis] = torch.nonzero(kept_here).reshape(-1)
    return indices


def kept_along(channel: Tensor, mask: Tensor) -> Tensor:
    """Flags along an axis whose indices belong to these channels (−1: none, so kept)."""
    return (channel < 0) | mask[channel.clamp(min=0)]


def consumers_cut(graph: Graph, indices: Mapping[Axis, Tensor]) -> list[Consumer]:
    """The consumers that lose inputs."""
    return [c for c in graph.consumers.values() if (c.weight, c.axis) in indices]


def take(tensor: Tensor, name: str, indices: Mapping[Axis, Tensor]) -> Tensor:
    """A parameter without the pruned channels, along all its axes."""
    for axis in range(tensor.dim()):
        if (name, axis) in indices:
            tensor = tensor.index_select(axis, indices[name, axis].to(tensor.device))
    return tensor


def pruned_of(channels: int, kept: Tensor) -> Tensor:
    """The pruned channels, ascending."""
    mask = torch.ones(channels, dtype=torch.bool)
    mask[kept] = False
    return torch.nonzero(mask).reshape(-1)
