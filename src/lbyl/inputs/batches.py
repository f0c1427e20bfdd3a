"""Batches of inputs for a network: procedural, inverted, or random text, by its example."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.inputs.inversion import invert
from lbyl.inputs.procedural import procedural_images
from lbyl.inputs.spectrum import SpectrumGains, match_first_batchnorm
from lbyl.inputs.tokens import find_text, random_text
from lbyl.torchkit.run import Inputs, Progress, device_of, example_shape


@dataclass
class InputBatches:
    """Batches to run a network on, and how BatchNorm normalises meanwhile."""

    batches: Iterable[Inputs]
    count: int  # of batches
    batch_statistics: bool  # BatchNorm normalises by the batch, or as in use
    source: str  # "procedural", "inversion" or "own"
    seconds: dict[str, float] = field(default_factory=dict)


BATCH_PIXELS = 1 << 22  # images × height × width that run at once
SECOND_PASS = 4  # the second pass runs a quarter of a collection: both networks see the same
JUDGING, FORECASTING = 10_000, 20_000  # added to the seed, far from the draws of refinement
FORECAST, FORECAST_BATCH = 2, 64  # half of a collection tells how much is kept, in small batches
AHEAD = 8  # steps of refinement that are drawn at once,
AHEAD_PIXELS = 1 << 25  # of images no larger than these in all
STEP, FEWEST = 8, 64  # a step of refinement runs an eighth, but so many at least
LISTED = 32  # images for detectors, which make them large
LISTED_BATCH = 4


def image_count(shape: tuple[int, ...]) -> int:
    """About 1,000 images at CIFAR's size, 256 at 224 px."""
    return max(256, min(1024, (3 << 22) // max(1, math.prod(shape[1:]))))


@dataclass(frozen=True)
class FreshInputs:
    """Data-free inputs of a network by seed: one set to collect on, others it has not seen.

    Images get the gains that match the network's first BatchNorm, fitted once.
    """

    model: nn.Module
    example_inputs: Inputs
    seed: int = 0

    @cached_property
    def gains(self) -> SpectrumGains | None:
        return match_first_batchnorm(self.model, self.example_inputs)

    def collection(self, count: int | None = None) -> InputBatches:
        """The inputs that statistics are collected on."""
        return self._draw(count, 0)

    @cached_property
    def second_pass(self) -> InputBatches:
        """Inputs to recalibrate on, which no collection has seen."""
        return self._draw(max(8, self._total() // SECOND_PASS), 1)

    def judging(self, part: int) -> list[Inputs]:
        """Inputs to compare networks on, which nothing was fitted on: 1/`part` of a collection."""
        return list(self._draw(max(8, self._total() // part), JUDGING).batches)

    @cached_property
    def forecasting(self) -> list[Inputs]:
        """Inputs that neither anything was fitted on nor any choice was made by."""
        count = max(8, self._total() // FORECAST)
        drawn = list(self._draw(count, FORECASTING).batches)
        if _takes_lists(self.example_inputs):
            return drawn
        return [x for b in drawn for x in _split(b, len(_first(b)), FORECAST_BATCH)]

    def endless(self) -> Iterator[Inputs]:
        """Further batches for refinement, drawn anew as long as they are asked for.

        Several are drawn at once: what one drawing takes hardly depends on how many it makes.
        """
        count = self._step_count()
        pixels = count * math.prod(example_shape(self.example_inputs)[1:])
        ahead = max(1, min(AHEAD, AHEAD_PIXELS // max(1, pixels)))
        for draw in itertools.count(2):
            yield from self._draw(count * ahead, draw, count).batches

    def endless_from(self, pool: InputBatches) -> Iterator[Inputs]:
        """Batches for refinement out of a pool of images, shuffled anew each time round.

        The first batch is handed out once only: refinement judges by it.
        """
        images = torch.cat([x for x in pool.batches if isinstance(x, Tensor)])
        size = min(self._step_count(), max(1, len(images) // 2))
        generator = torch.Generator().manual_seed(self.seed)
        yield images[:size]
        while True:
            order = torch.randperm(len(images) - size, generator=generator) + size
            for part in order.split(size)[: max(1, len(order) // size)]:
                yield images[part.to(images.device)]

    def _total(self) -> int:
        """How many inputs a collection has."""
        if _takes_lists(self.example_inputs):
            return LISTED
        return image_count(example_shape(self.example_inputs))

    def _step_count(self) -> int:
        return max(FEWEST, image_count(example_shape(self.example_inputs)) // STEP)

    def _draw(self, count: int | None, draw: int, per_batch: int | None = None) -> InputBatches:
        start = time.perf_counter()
        drawn = procedural(
            self.model,
            self.example_inputs,
            count=count,
            per_batch=per_batch,
            seed=self.seed + draw,
            gains=self.gains,
        )
        return replace(drawn, seconds={"images": time.perf_counter() - start})


def procedural(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    count: int | None = None,
    per_batch: int | None = None,
    seed: int = 0,
    gains: SpectrumGains | None = None,
) -> InputBatches:
    """Procedural images of the example's shape; random tokens where the example is of numbers.

    There are as many in a batch as `BATCH_PIXELS` allow unless `per_batch` is given. `gains` change
    the spectrum and the colours of images; None leaves them as painted.
    """
    device = device_of(model)
    example_inputs = tree_map_only(Tensor, lambda x: x.to(device), example_inputs)
    if _takes_lists(example_inputs):
        batches = _image_lists(example_inputs, count or LISTED, seed, device)
        return InputBatches(batches, len(batches), True, "procedural")
    tensors = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        raise LbylError("the example inputs hold no tensor to model inputs on")
    shape = tuple(tensors[0].shape[1:])
    total = count or image_count(shape)
    text = find_text(model, example_inputs)
    if text is not None:
        made = random_text(text, example_inputs, total, seed)
    else:
        like = partial(_like, total=total, batch=tensors[0].shape[0], seed=seed, gains=gains)
        made = tree_map_only(Tensor, like, example_inputs)
    most = max(16, min(total, BATCH_PIXELS // max(1, math.prod(shape[1:]))))
    batches = _split(made, total, per_batch or most)
    return InputBatches(batches, len(batches), True, "procedural")


def _first(inputs: Inputs) -> Tensor:
    """The first tensor among inputs of any form."""
    return next(x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor))


def _split(inputs: Inputs, total: int, per_batch: int) -> list[Inputs]:
    """Inputs in batches; a small last one, which has poor statistics, joins the one before."""
    sizes = [min(per_batch, total - i) for i in range(0, total, per_batch)]
    if len(sizes) > 1 and sizes[-1] < per_batch // 2:
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_part(inputs, first, size) for first, size in zip(offsets, sizes)]


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


def _like(x: Tensor, total: int, batch: int, seed: int, gains: SpectrumGains | None) -> Tensor:
    """`total` inputs like the example: images for floats, shuffled tokens for whole numbers."""
    if not x.dim() or x.shape[0] != batch:
        return x
    if x.dtype.is_floating_point and x.dim() > 1:
        images = procedural_images(total, tuple(x.shape[1:]), seed=seed, device=x.device)
        return (images if gains is None else gains(images)).to(x.dtype)
    generator = torch.Generator().manual_seed(seed)
    if x.dtype == torch.long and int(x.max()) > 1:
        tokens = torch.randint(int(x.max()) + 1, (total, *x.shape[1:]), generator=generator)
        return tokens.to(x.device)
    return x[:1].expand(total, *x.shape[1:])  # masks and flags stay as they are


def inverted(
    model: nn.Module, inputs: InputBatches, progress: Progress | None = None
) -> InputBatches:
    """The same inputs after gradient steps that match every running statistic."""
    start = time.perf_counter()
    batches = list(inputs.batches)
    if not all(isinstance(x, Tensor) and x.dtype.is_floating_point for x in batches):
        raise LbylError("data='inversion' needs a network that takes one image tensor")
    changed = invert(model, batches, progress=progress)
    seconds = {**inputs.seconds, "inversion": time.perf_counter() - start}
    # They agree with the running statistics, so BatchNorm may work in its ordinary mode.
    return InputBatches(changed, len(changed), False, "inversion", seconds)
