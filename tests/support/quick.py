"""Compressions for tests: on few images, with plans made by hand, with corrections by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import lbyl

FEW = 32
Amount = Any
"""What is pruned: a ratio, patterns with a ratio each, a budget, or a plan."""


def data_for(amount: Amount | None, method: Any, criterion: Any, images: int = FEW) -> int | None:
    """A few procedural images where a compression looks at any, None where it looks at none."""
    made = lbyl.methods.resolve(method)
    looks = made.needs_statistics or made.corrects or isinstance(amount, lbyl.Budget)
    if criterion is not None:
        looks = looks or lbyl.criteria.resolve(criterion).needs_statistics
    return images if looks else None


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
    """Statistics of a network on all of these inputs, with nothing data-free beside them.

    A network that runs on nothing else, and on no other number of them, is measured on them alone.
    """
    batches = [own] if isinstance(own, Tensor) else list(own)
    prepared = lbyl.prepare(model, inputs, data=batches, **tracing)
    known = [[x for x in tree_flatten(b)[0] if isinstance(x, Tensor)] for b in batches]

    def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not any(len(k) == len(given) and all(map(torch.equal, k, given)) for k in known):
            raise ValueError("these are not the inputs of this test")

    handle = prepared.model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        return prepared.statistics(taps=taps)
    finally:
        handle.remove()


def correcting(method: Any, correction: str) -> lbyl.methods.Method:
    """A method that puts back so much behind the consumers."""
    return replace(lbyl.methods.resolve(method), correction=correction)


def plan_for(graph: lbyl.Graph, kept: Mapping[str, Sequence[int] | Tensor]) -> lbyl.Plan:
    """A plan made by hand: which channels stay, of the units named."""
    return lbyl.Plan(
        {name: torch.as_tensor(indices) for name, indices in kept.items()},
        {name: graph[name].channels for name in kept},
    )
