"""The examples of a batch, which lie along the first axis: how many, some of them, all of several.

Inputs are of any form. What is not there once for each example (a flag, a table) goes with every
part of a batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lbyl.runtime.run import Inputs


def rows_in(inputs: Inputs) -> int | None:
    """How many examples inputs hold; None where they hold no tensor with a dimension."""
    if takes_lists(inputs):
        return len(inputs[0])
    sizes = [len(x) for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.dim()]
    return sizes[0] if sizes and sizes[0] else None


def takes_lists(inputs: Inputs) -> bool:
    """Whether the first argument is a list of images, as torchvision's detectors take."""
    first = inputs[0] if isinstance(inputs, tuple) and inputs else None
    return isinstance(first, list) and all(isinstance(x, Tensor) and x.dim() == 3 for x in first)


def first_tensor(inputs: Inputs) -> Tensor:
    """The first tensor among inputs of any form."""
    return next(x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor))


def split_sizes(total: int, per_batch: int) -> list[int]:
    """Of batches; a small last one, which has poor statistics, joins the one before."""
    sizes = [min(per_batch, total - i) for i in range(0, total, per_batch)]
    if len(sizes) > 1 and sizes[-1] < per_batch // 2:
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    return sizes


def split(inputs: Inputs, total: int, per_batch: int) -> list[Inputs]:
    """Inputs in batches; what is not there `total` times goes with each."""
    sizes = split_sizes(total, per_batch)
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [part_of(inputs, first, size, total) for first, size in zip(offsets, sizes)]


def part_of(inputs: Inputs, first: int, size: int, total: int | None = None) -> Inputs:
    """Some of the examples; what is not there `total` times, where that is told, is none."""

    def taken(x: Tensor) -> Tensor:
        each = x.dim() and total in (None, len(x))
        return x[first : first + size] if each else x

    return tree_map_only(Tensor, taken, inputs)


def some_rows(inputs: Inputs, rows: Tensor, total: int) -> Inputs:
    """The examples of these numbers, out of `total`."""
    return tree_map_only(Tensor, partial(_chosen, rows=rows, total=total), inputs)


def _chosen(x: Tensor, rows: Tensor, total: int) -> Tensor:
    return x[rows.to(x.device)] if x.dim() and len(x) == total else x


def joined(batches: list[Inputs]) -> Inputs:
    """Batches of one form as one; what is not one for each example is that of the first."""
    flat, structure = zip(*(tree_flatten(batch) for batch in batches))
    rows = rows_in(batches[0])

    def together(parts: tuple[Any, ...]) -> Any:
        first = parts[0]
        each = isinstance(first, Tensor) and first.dim() and len(first) == rows
        return torch.cat(parts) if each else first

    return tree_unflatten([together(parts) for parts in zip(*flat)], structure[0])


def regrouped(batches: list[Inputs], size: int) -> list[Inputs]:
    """Neighbours of one form joined to batches of about `size`."""
    groups: list[list[Inputs]] = []
    held, last = 0, None
    for batch in batches:
        rows = rows_in(batch)
        leaves, structure = tree_flatten(batch)
        form = structure, [_form(x, rows) for x in leaves]
        if not groups or form != last or held >= size:
            groups.append([])
            held = 0
        groups[-1].append(batch)
        held, last = held + (rows or size), form
    return [group[0] if len(group) == 1 else joined(group) for group in groups]


def _form(x: Any, rows: int | None) -> Any:
    """What must be equal of two batches that are joined: all of what is not one for each row."""
    if isinstance(x, Tensor):
        return (x.shape[1:], x.dtype) if x.dim() and len(x) == rows else id(x)
    return x
