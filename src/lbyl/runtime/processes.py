"""Several processes on one network, as `torchrun` or `accelerate launch` starts them.

Each runs its share of the batches and solves its share of the layers; sums and solutions are
exchanged, so that all hold the same in the end. One process alone exchanges nothing. All of them
must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def several() -> bool:
    """Whether this process works together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_size() -> tuple[int, int]:
    """The number of this process, and of how many."""
    return (dist.get_rank(), dist.get_world_size()) if several() else (0, 1)


def is_mine(number: int) -> bool:
    """Whether the work of this number is done by this process."""
    rank, size = rank_and_size()
    return number % size == rank


def share(items: Iterable[T]) -> Iterator[tuple[int, T]]:
    """The items of this process, each with its number among all."""
    return ((i, item) for i, item in enumerate(items) if is_mine(i))


def summed(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, in place."""
    if several():
        dist.all_reduce(tensor)
    return tensor


def averaged(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Each tensor's mean over all processes; None is None in all of them."""
    _, size = rank_and_size()
    return [t if t is None or size == 1 else summed(t.contiguous()).div_(size) for t in tensors]


def from_owner(tensor: Tensor, number: int) -> Tensor:
    """What the process that did the work of this number has; shapes are the same in all."""
    _, size = rank_and_size()
    if size > 1:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, number % size)
    return tensor


def largest(number: int, device: torch.device) -> int:
    """The largest of what the processes give."""
    if not several():
        return number
    value = torch.tensor(number, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def gathered(value: T) -> list[T]:
    """What every process gives, in their order; small things, or tensors on the CPU."""
    if not several():
        return [value]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def agreed(number: float) -> float:
    """What the first process gives: a choice must not depend on another's last digit."""
    return gathered(number)[0]
