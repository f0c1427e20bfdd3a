"""Compressions for tests: on few images, with plans made by hand, with corrections by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from lbyl.inputs.loader import own_batches
from lbyl.planning.plan import Plan
from lbyl.planning.task import Amount, Task
from lbyl.statistics.collect import collect

FEW = 32


def data_for(amount: Amount | None, method: Any, criterion: Any, images: int = FEW) -> int | None:
    """A few procedural images where a compression looks at any, None where it looks at none."""
    return images if Task.of(amount, criterion, method, None).needs_statistics else None


def compress(
    model: nn.Module,
    inputs: Any,
    amount: Amount | None = None,
    *,
    images: int = FEW,
    method: Any = "echo",
    criterion: Any = None,
    **options: Any,
) -> lbyl.Result:
    """`lbyl.compress` on a few procedural images, where it looks at images at all."""
    data = data_for(amount, method, criterion, images)
    return lbyl.compress(
        model, inputs, amount, method=method, criterion=criterion, data=data, **options
    )


def statistics(model: nn.Module, inputs: Any, data: Any = FEW, **options: Any) -> lbyl.Statistics:
    """Statistics of a network on a few procedural images, or on what is given."""
    taps = options.pop("taps", "auto")
    return lbyl.prepare(model, inputs, data=data, **options).statistics(taps=taps)


def own_statistics(
    model: nn.Module, inputs: Any, own: Any, taps: str = "auto", **tracing: Any
) -> lbyl.Statistics:
    """Statistics of a network on inputs alone, with nothing data-free beside them."""
    graph = lbyl.trace(model, inputs, **tracing)
    return collect(model, graph, own_batches(model, own), taps=taps)


def correcting(method: Any, correction: str) -> lbyl.methods.Method:
    """A method that puts back so much behind the consumers."""
    return replace(lbyl.methods.resolve(method), correction=correction)


def plan_for(graph: lbyl.Graph, kept: Mapping[str, Sequence[int] | Tensor]) -> Plan:
    """A plan made by hand: which channels stay, of the units named."""
    return Plan(
        {name: torch.as_tensor(indices) for name, indices in kept.items()},
        {name: graph[name].channels for name in kept},
    )
