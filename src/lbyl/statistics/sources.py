"""What a network is run on to learn its statistics: procedural inputs or a user's own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.exceptions import LbylError
from lbyl.record import Inputs
from lbyl.statistics.collect import Passes
from lbyl.statistics.synthetic import procedural_images

BATCH_PIXELS = 1 << 22  # images × height × width that run at once


def image_count(shape: tuple[int, ...]) -> int:
    """About 1,000 images at CIFAR's size, 256 at 224 px."""
    return max(256, min(1024, (3 << 22) // max(1, math.prod(shape[1:]))))


def procedural(
    model: nn.Module, example_inputs: Inputs, *, count: int | None = None, seed: int = 0
) -> Passes:
    """Procedural images of the example's shape; random tokens where the example is of numbers."""
    start = time.perf_counter()
    device = _device(model)
    tensors = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        raise LbylError("the example inputs hold no tensor to model inputs on")
    shape = tuple(tensors[0].shape[1:])
    total = count or image_count(shape)
    per_batch = max(16, min(total, BATCH_PIXELS // max(1, math.prod(shape[1:]))))
    sizes = [min(per_batch, total - i) for i in range(0, total, per_batch)]
    if len(sizes) > 1 and sizes[-1] < per_batch // 2:  # a small batch has poor statistics
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    made = tree_map_only(
        Tensor, lambda x: _like(x, total, tensors[0].shape[0], seed, device), example_inputs
    )
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [
        tree_map_only(Tensor, lambda x, a=a, n=n: x[a : a + n] if x.dim() else x, made)
        for a, n in zip(offsets, sizes)
    ]
    seconds = {"images": time.perf_counter() - start}
    return Passes(batches, len(batches), True, "procedural", seconds)


def _like(x: Tensor, total: int, batch: int, seed: int, device: torch.device) -> Tensor:
    """`total` inputs like the example: images for floats, shuffled tokens for whole numbers."""
    if not x.dim() or x.shape[0] != batch:
        return x.to(device)
    if x.dtype.is_floating_point and x.dim() > 1:
        return procedural_images(total, tuple(x.shape[1:]), seed=seed, device=str(device)).to(
            x.dtype
        )
    generator = torch.Generator().manual_seed(seed)
    if x.dtype == torch.long and int(x.max()) > 1:
        tokens = torch.randint(int(x.max()) + 1, (total, *x.shape[1:]), generator=generator)
        return tokens.to(device)
    return x[:1].expand(total, *x.shape[1:]).to(device)  # masks and flags stay as they are


def calibration(model: nn.Module, loader: Iterable[Any], *, limit: int | None = None) -> Passes:
    """A user's own unlabelled inputs; labels that come along are ignored."""
    device = _device(model)
    if isinstance(loader, Tensor):
        loader = list(loader.split(256))
    batches = list(_unlabelled(loader, device, limit))
    if not batches:
        raise LbylError("the calibration loader gave no batch")
    return Passes(batches, len(batches), False, "calibration")


def _unlabelled(loader: Iterable[Any], device: torch.device, limit: int | None) -> Iterator[Inputs]:
    seen = 0
    for batch in loader:
        inputs: Any = batch
        if isinstance(batch, (list, tuple)) and batch:
            inputs = batch[0]  # (images, labels), as loaders of labelled data give
        if not isinstance(inputs, (Tensor, Mapping)):
            raise LbylError(
                f"calibration batches must be tensors, dicts or (inputs, labels), not "
                f"{type(inputs).__name__}"
            )
        inputs = tree_map_only(Tensor, lambda x: x.to(device), inputs)
        yield inputs
        first = next(x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor))
        seen += first.shape[0]
        if limit is not None and seen >= limit:
            return


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
