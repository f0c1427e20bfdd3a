"""What a network is run on to learn its statistics: procedural inputs or a user's own."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.exceptions import LbylError
from lbyl.record import Inputs, device_of
from lbyl.statistics.gather import Passes, Progress
from lbyl.statistics.synthetic import procedural_images
from lbyl.statistics.tokens import find_text, random_text
from lbyl.statistics.tone import Tone, remembered_tone

REMEMBERED: Literal["remembered"] = "remembered"
BATCH_PIXELS = 1 << 22  # images × height × width that run at once
FEWER = 4  # for the second pass a quarter of a collection is enough: both networks see the same
PART, FEWEST = 8, 64  # a step of refinement sees this part of one, but so many at least


def image_count(shape: tuple[int, ...]) -> int:
    """About 1,000 images at CIFAR's size, 256 at 224 px."""
    return max(256, min(1024, (3 << 22) // max(1, math.prod(shape[1:]))))


def procedural(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    count: int | None = None,
    seed: int = 0,
    tone: Tone | Literal["remembered"] | None = REMEMBERED,
) -> Passes:
    """Procedural images of the example's shape; random tokens where the example is of numbers.

    Images come in the tone that the network remembers, unless one is given (None: as painted).
    """
    start = time.perf_counter()
    device = device_of(model)
    example_inputs = tree_map_only(Tensor, lambda x: x.to(device), example_inputs)
    if _takes_lists(example_inputs):
        batches = _image_lists(example_inputs, count or LISTED, seed, device)
        seconds = {"images": time.perf_counter() - start}
        return Passes(batches, len(batches), True, "procedural", seconds)
    tensors = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        raise LbylError("the example inputs hold no tensor to model inputs on")
    shape = tuple(tensors[0].shape[1:])
    total = count or image_count(shape)
    per_batch = max(16, min(total, BATCH_PIXELS // max(1, math.prod(shape[1:]))))
    sizes = [min(per_batch, total - i) for i in range(0, total, per_batch)]
    if len(sizes) > 1 and sizes[-1] < per_batch // 2:  # a small batch has poor statistics
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    text = find_text(model, example_inputs)
    if text is not None:
        made = random_text(text, example_inputs, total, seed)
    else:
        if tone == REMEMBERED:
            tone = remembered_tone(model, example_inputs)
        like = partial(_like, total=total, batch=tensors[0].shape[0], seed=seed, tone=tone)
        made = tree_map_only(Tensor, like, example_inputs)
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [_part(made, first, size) for first, size in zip(offsets, sizes)]
    seconds = {"images": time.perf_counter() - start}
    return Passes(batches, len(batches), True, "procedural", seconds)


def example_shape(example_inputs: Inputs) -> tuple[int, ...]:
    """The shape of one example, of the first tensor where there are several."""
    first = next(x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor))
    return tuple(first.shape[1:])


@dataclass(frozen=True)
class Unseen:
    """Procedural inputs that a collection with this seed has not seen, all in one tone."""

    model: nn.Module
    example_inputs: Inputs
    seed: int

    @cached_property
    def tone(self) -> Tone | None:
        return remembered_tone(self.model, self.example_inputs)

    @cached_property
    def few(self) -> Passes:
        """Those of the second pass."""
        listed = _takes_lists(self.example_inputs)
        total = LISTED if listed else image_count(example_shape(self.example_inputs))
        return self._drawn(max(8, total // FEWER), 1)

    def endless(self) -> Iterator[Inputs]:
        """Others, drawn anew as long as they are asked for."""
        count = max(FEWEST, image_count(example_shape(self.example_inputs)) // PART)
        for place in itertools.count(2):
            yield from self._drawn(count, place).batches

    def _drawn(self, count: int, place: int) -> Passes:
        seed = self.seed + place  # 0 is the collection's
        return procedural(self.model, self.example_inputs, count=count, seed=seed, tone=self.tone)


LISTED = 32  # images for detectors, which make them large
LISTED_BATCH = 4


def _takes_lists(inputs: Inputs) -> bool:
    """Whether the first argument is a list of images, as torchvision's detectors take."""
    first = inputs[0] if isinstance(inputs, tuple) and inputs else None
    return isinstance(first, list) and all(isinstance(x, Tensor) and x.dim() == 3 for x in first)


def _image_lists(inputs: Inputs, total: int, seed: int, device: torch.device) -> list[Inputs]:
    """Batches of lists of images between 0 and 1, which detectors normalise themselves."""
    like = inputs[0][0]
    images = procedural_images(total, tuple(like.shape), seed=seed, device=str(device)).to(like)
    images = (0.5 + 0.25 * images).clamp(0, 1)
    return [(list(part), *inputs[1:]) for part in images.split(LISTED_BATCH)]


def _part(inputs: Inputs, first: int, size: int) -> Inputs:
    return tree_map_only(Tensor, lambda x: x[first : first + size] if x.dim() else x, inputs)


def _like(x: Tensor, total: int, batch: int, seed: int, tone: Tone | None) -> Tensor:
    """`total` inputs like the example: images for floats, shuffled tokens for whole numbers."""
    if not x.dim() or x.shape[0] != batch:
        return x
    if x.dtype.is_floating_point and x.dim() > 1:
        images = procedural_images(total, tuple(x.shape[1:]), seed=seed, device=x.device)
        return (images if tone is None else tone(images)).to(x.dtype)
    generator = torch.Generator().manual_seed(seed)
    if x.dtype == torch.long and int(x.max()) > 1:
        tokens = torch.randint(int(x.max()) + 1, (total, *x.shape[1:]), generator=generator)
        return tokens.to(x.device)
    return x[:1].expand(total, *x.shape[1:])  # masks and flags stay as they are


def inverted(model: nn.Module, passes: Passes, progress: Progress | None = None) -> Passes:
    """The same inputs after gradient steps that make BatchNorm see what it remembers."""
    from lbyl.statistics.inversion import invert

    start = time.perf_counter()
    batches = list(passes.batches)
    if not all(isinstance(x, Tensor) and x.dtype.is_floating_point for x in batches):
        raise LbylError("images='inversion' needs a network that takes one image tensor")
    changed = [invert(model, x, progress=progress) for x in batches]
    seconds = {**passes.seconds, "inversion": time.perf_counter() - start}
    # They agree with the running statistics, so BatchNorm may work in its ordinary mode.
    return Passes(changed, len(changed), False, "inversion", seconds)


def calibration(model: nn.Module, loader: Iterable[Any], *, limit: int | None = None) -> Passes:
    """A user's own unlabelled inputs; labels that come along are ignored."""
    device = device_of(model)
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
