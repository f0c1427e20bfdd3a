"""What a network is run on, as the network itself sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import lbyl


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Any]]:
    """All inputs that a network, or a copy of it that is made meanwhile, is run on, in order."""
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs or (args[0] if len(args) == 1 else args))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
        seen[:] = filter(_has_data, seen)  # some runs are for shapes alone


def _has_data(given: Any) -> bool:
    tensors = [x for x in tree_flatten(given)[0] if isinstance(x, Tensor)]
    return all(type(x) is Tensor and not x.is_meta for x in tensors)


def rows_of(given: Any) -> int:
    first = tree_flatten(given)[0][0]
    return len(first) if isinstance(given, (Tensor, dict)) else len(given[0])


def collected(model: nn.Module, x: Any, data: Any = 64, **options: Any) -> list[Any]:
    """The batches that statistics are collected on: so many, or all that are given."""
    prepared = lbyl.prepare(model, x, data=data, **options)
    with watched(prepared.model) as seen:
        prepared.statistics()
    batches: list[Any] = []
    while seen and (not isinstance(data, int) or sum(map(rows_of, batches)) < data):
        batches.insert(0, seen.pop())
    return batches


def images(model: nn.Module, x: Tensor, count: int = 64, **options: Any) -> Tensor:
    """The images that statistics are collected on, in one tensor."""
    return torch.cat(collected(model, x, count, **options))
