"""Batches of inputs for a network: procedural, inverted, or text, by its example."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.inputs.examples import (
    first_tensor,
    joined,
    part_of,
    rows_in,
    some_rows,
    split,
    split_sizes,
    takes_lists,
)
from lbyl.inputs.images.inversion import invert
from lbyl.inputs.images.procedural import (
    as_given,
    channels_come_last,
    channels_first,
    procedural_images,
)
from lbyl.inputs.images.spectrum import SpectrumGains, match_first_batchnorm, match_first_biases
from lbyl.inputs.text.tokens import common_tokens, find_text, random_text
from lbyl.inputs.text.writing import RANDOM, SEQUENCES, Author, find_author
from lbyl.runtime.heap import keep_no_more
from lbyl.runtime.layout import channels_last, prefers_channels_last
from lbyl.runtime.run import (
    Inputs,
    Progress,
    call_model,
    device_of,
    evaluation_mode,
    example_shape,
)
from lbyl.runtime.session import threads_for


@dataclass
class InputBatches:
    """Batches to run a network on, and how BatchNorm normalises meanwhile."""

    batches: Iterable[Inputs]
    count: int  # of batches
    batch_statistics: bool  # BatchNorm normalises by the batch, or as in use
    source: str  # "procedural", "inversion", "own", or what kind of text they are
    seconds: dict[str, float] = field(default_factory=dict)
    divisible: bool = False  # whether smaller batches would do as well

    @property
    def examples(self) -> int | None:
        """How many there are in all; None where a batch does not tell."""
        if isinstance(self.batches, DrawnLater):
            return sum(size for _, size in self.batches.sizes)
        counts = [rows_in(batch) for batch in self.batches]
        return None if None in counts else sum(count for count in counts if count is not None)

    def at_most(self, size: int) -> InputBatches:
        """As many inputs of the same kind in batches of about `size` at most, where that may be."""
        batches = self.batches
        if not self.divisible:
            return self
        if isinstance(batches, DrawnLater):
            sizes = [part for _, whole in batches.sizes for part in split_sizes(whole, size)]
            smaller: Sequence[Inputs] = replace(batches, sizes=tuple(enumerate(sizes)))
        else:
            sized = [(batch, rows_in(batch) or 1) for batch in batches]
            smaller = [part for batch, own in sized for part in split(batch, own, size)]
        return replace(self, batches=smaller, count=len(smaller))


BATCH_PIXELS = 1 << 22  # images × height × width that run at once,
FEWEST_AT_ONCE = 8  # but so many at least, for BatchNorm by the batch
DRAWN_PIXELS = 1 << 24  # beyond these batches are drawn when they are needed, and not held
LARGE = 1 << 18  # pixels of an image from which memory is worth more than time
SECOND_PASS = 4  # the second pass runs a quarter of a collection: both networks see the same
FEWEST_IN_PASS = 64  # but so many at least, where a collection has them
JUDGING, FORECASTING = 10_000, 20_000  # added to the seed, far from the draws of refinement
FORECAST, FORECAST_BATCH = 4, 64  # a quarter of a collection tells how much is kept, 64 at once
FORECAST_PIXELS = 1 << 18  # of a batch on a processor, whose memory is then used again and again
AHEAD = 8  # steps of refinement that are drawn at once,
AHEAD_PIXELS = 1 << 25  # of images no larger than these in all
STEP, FEWEST = 8, 64  # a step of refinement runs an eighth, but so many at least
JUDGED = 4  # of texts that are written so many times fewer are for judging, and the forecast
STEP_TOKENS = 2048  # of written text in a step of refinement
SEEN, MOST_TEXTS = 2, 1024  # how often its steps see a text, where so many can be written for them
IMAGINARY = 7919  # added to the seed for the imaginary parts of complex inputs
LISTED = 32  # images for detectors, which make them large
LISTED_BATCH = 4
LEAST_BATCH = 8  # of fewer inputs BatchNorm has no statistics of its own worth the name


@dataclass(frozen=True)
class DrawnLater(Sequence[Inputs]):
    """Batches that are drawn when they are asked for, each time the same, and not held."""

    sizes: tuple[tuple[int, int], ...]  # number and size of each batch
    draw: Callable[[int, int], Inputs]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return replace(self, sizes=self.sizes[index])
        return self.draw(*self.sizes[index])

    def then(self, change: Callable[[Inputs], Inputs]) -> DrawnLater:
        """The same batches, each changed after it is drawn."""
        return replace(self, draw=lambda number, size: change(self.draw(number, size)))


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
    count: int | None = None  # inputs of a collection; None: as many as suit the network
    progress: Progress | None = None

    @cached_property
    def fixed_batch(self) -> int | None:
        """The example's batch size where the network takes no other; None where any will do."""
        size = rows_in(self.example_inputs)
        if size is None or takes_lists(self.example_inputs):
            return None
        device = device_of(self.model)

        def twice(x: Tensor) -> Tensor:
            return torch.cat([x, x]).to(device) if x.dim() and len(x) == size else x.to(device)

        try:
            with torch.no_grad(), evaluation_mode(self.model):
                call_model(self.model, tree_map_only(Tensor, twice, self.example_inputs))
        except Exception:  # whatever the network complains of
            return size
        return None

    @cached_property
    def usable(self) -> bool:
        """Whether the network runs on inputs that are drawn for it."""
        try:
            with torch.no_grad(), evaluation_mode(self.model):
                call_model(self.model, next(iter(self._draw(LEAST_BATCH, 0).batches)))
        except Exception:  # whatever cannot be drawn, or the network complains of
            return False
        return True

    @cached_property
    def gains(self) -> SpectrumGains | None:
        found = match_first_batchnorm(self.model, self.example_inputs)
        return match_first_biases(self.model, self.example_inputs) if found is None else found

    @cached_property
    def common(self) -> Tensor | None:
        """Tokens that stand in every text, of a network that reads and cannot write."""
        if self.author is None or self.author.kind != RANDOM:
            return None
        try:
            return common_tokens(self.model, self.author.example_inputs, self.author.text)
        except Exception:  # whatever the network says to a longer text
            return None

    @cached_property
    def author(self) -> Author | None:
        """The network as one that writes text; None where it takes no tokens."""
        if takes_lists(self.example_inputs):
            return None
        return find_author(self.model, self.example_inputs)

    @cached_property
    def _written(self) -> tuple[Inputs, float]:
        """All texts (for collecting, then for judging, then for the forecast), and seconds.

        They are written in one go: a further text costs little where many are written at once.
        """
        assert self.author is not None
        start, total = time.perf_counter(), self._total()
        texts = self.author.write(total + 2 * _held(total), self.seed, self.progress)
        return texts, time.perf_counter() - start

    @property
    def _writes(self) -> bool:
        return self.author is not None and self.author.kind != RANDOM

    def collection(self, count: int | None = None) -> InputBatches:
        """The inputs that statistics are collected on."""
        if count is not None:
            return replace(self, count=count).collection()
        if self._writes:
            texts, seconds = self._written
            return self._texts(part_of(texts, 0, self._total()), {"writing": seconds})
        return self._draw(self.count, 0)

    @cached_property
    def second_pass(self) -> InputBatches:
        """Inputs to recalibrate on, which no collection has seen."""
        if self._writes:
            return self._texts(self._held(JUDGING), {})
        return self._draw(self.second_pass_count, 1)

    @property
    def second_pass_count(self) -> int:
        """How many inputs a second pass runs."""
        asked, most = self._asked(), self._total() // SECOND_PASS
        count = min(most, max(asked // SECOND_PASS, min(asked, FEWEST_IN_PASS)))
        return max(FEWEST_AT_ONCE, count)

    def judging(self, part: int) -> Sequence[Inputs]:
        """Inputs to compare networks on, which nothing was fitted on: 1/`part` of a collection."""
        if self._writes:
            return list(self._texts(self._held(JUDGING, max(1, part // JUDGED)), {}).batches)
        return _held_or_drawn(self._draw(max(8, self._asked() // part), JUDGING))

    def forecasting(self, attempt: int = 0, least: int = 0) -> Sequence[Inputs]:
        """Inputs that neither anything was fitted on nor any choice was made by.

        They are others for every attempt, and `least` at least where they are not texts written.
        """
        if self._writes:
            return list(self._texts(self._held(FORECASTING), {}).batches)
        count = max(8, self._asked() // FORECAST, least)
        size = FORECAST_BATCH
        if device_of(self.model).type == "cpu":
            pixels = math.prod(_image_shape(self.example_inputs)[1:])
            size = max(1, min(size, FORECAST_PIXELS // max(1, pixels)))
        return _held_or_drawn(self._draw(count, FORECASTING + attempt, size))

    def _held(self, what: int, part: int = 1) -> Inputs:
        """1/`part` of the texts that were not collected on, those for judging or the forecast."""
        total = self._total()
        first = total if what == JUDGING else total + _held(total)
        return part_of(self._written[0], first, max(1, _held(total) // part))

    def _texts(self, texts: Inputs, seconds: dict[str, float]) -> InputBatches:
        assert self.author is not None
        rows = self.author.rows_at_once(self.author.length)
        batches = split(texts, len(first_tensor(texts)), rows)
        return InputBatches(batches, len(batches), True, self.author.kind, seconds)

    def endless(self, steps: int = 1) -> Iterator[Inputs]:
        """Further batches for refinement, drawn anew as long as they are asked for.

        Several are drawn at once: what one drawing takes hardly depends on how many it makes.
        Texts are written for about so many `steps`, and used again in another order each time.
        """
        if self._writes:
            yield from self.endless_from(self._texts_for(steps))
        count = self._step_count()
        pixels = count * math.prod(_image_shape(self.example_inputs)[1:])
        ahead = max(1, min(AHEAD, AHEAD_PIXELS // max(1, pixels)))
        for draw in itertools.count(2):
            yield from self._draw(count * ahead, draw, count).batches

    def _texts_for(self, steps: int) -> InputBatches:
        """Texts to refine on: others than were collected on where a cache makes them cheap.

        To write a token is one pass over it and to learn from it are four, so that texts that are
        seen twice take an eighth of the time; seen more often they are learnt by heart.
        """
        assert self.author is not None
        wanted = min(MOST_TEXTS, steps * self._step_count() // SEEN)
        if self.count is not None or not self.author.writes_with_cache or wanted <= self._total():
            return self.collection()
        if wanted not in self._further:
            self._further[wanted] = self.author.write(wanted, self.seed + 2, self.progress)
        return self._texts(self._further[wanted], {})

    @cached_property
    def _further(self) -> dict[int, Inputs]:
        """Texts for refinement by their number."""
        return {}

    def endless_from(self, pool: InputBatches) -> Iterator[Inputs]:
        """Batches for refinement out of a pool of inputs, shuffled anew each time round.

        The first batch is handed out once only: refinement judges by it.
        """
        inputs = joined(list(pool.batches))
        total = len(first_tensor(inputs))
        size = self.fixed_batch or min(self._step_count(), max(1, total // 2))
        generator = torch.Generator().manual_seed(self.seed)
        yield part_of(inputs, 0, size)
        while True:
            order = torch.randperm(total - size, generator=generator) + size
            for rows in order.split(size)[: max(1, len(order) // size)]:
                yield some_rows(inputs, rows, total)

    def endless_with(self, pool: InputBatches) -> Iterator[Inputs]:
        """Batches out of a pool in turn with fresh ones: steps never run out of what is new.

        The first is out of the pool, and handed out once only.
        """
        own = self.endless_from(pool)
        yield next(own)
        yield from itertools.chain.from_iterable(zip(own, self.endless()))

    def _total(self) -> int:
        """How many inputs a collection has unless others are asked for."""
        if takes_lists(self.example_inputs):
            return LISTED
        if self._writes:
            return self.count or SEQUENCES
        return image_count(_image_shape(self.example_inputs))

    def _asked(self) -> int:
        """Inputs of a collection: who asks for fewer, or more, means those compared on, too."""
        return self.count or self._total()

    def _step_count(self) -> int:
        if self._writes:
            assert self.author is not None
            return max(2, STEP_TOKENS // self.author.length)
        return max(FEWEST, image_count(_image_shape(self.example_inputs)) // STEP)

    def _draw(self, count: int | None, draw: int, per_batch: int | None = None) -> InputBatches:
        start = time.perf_counter()
        if math.prod(_image_shape(self.example_inputs)[1:]) > LARGE:
            keep_no_more()
        fixed = self.fixed_batch
        if fixed is not None:  # whole batches only
            count, per_batch = -(-(count or self._total()) // fixed) * fixed, fixed
        with threads_for(device_of(self.model)):
            drawn = procedural(
                self.model,
                self.example_inputs,
                count=count,
                per_batch=per_batch,
                seed=self.seed + draw,
                gains=self.gains,
                common=self.common,
            )
        drawn = replace(drawn, divisible=fixed is None and not takes_lists(self.example_inputs))
        if fixed is not None and fixed < LEAST_BATCH:
            drawn = replace(drawn, batch_statistics=False)
        if self._channels_last:
            batches = drawn.batches
            if isinstance(batches, DrawnLater):
                moved: Sequence[Inputs] = batches.then(channels_last)
            else:
                moved = [channels_last(batch) for batch in batches]
            drawn = replace(drawn, batches=moved)
        return replace(drawn, seconds={"images": time.perf_counter() - start})

    @cached_property
    def _channels_last(self) -> bool:
        return prefers_channels_last(self.model, self.example_inputs)


def _held_or_drawn(inputs: InputBatches) -> Sequence[Inputs]:
    """Batches to go through again and again."""
    batches = inputs.batches
    return batches if isinstance(batches, DrawnLater) else list(batches)


def _held(total: int) -> int:
    """Texts that are kept for judging, and as many for the forecast."""
    return max(2, total // JUDGED)


def _image_shape(example_inputs: Inputs) -> tuple[int, ...]:
    """The shape of one example, its channels first."""
    return channels_first(example_shape(example_inputs))


def procedural(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    count: int | None = None,
    per_batch: int | None = None,
    seed: int = 0,
    gains: SpectrumGains | None = None,
    common: Tensor | None = None,
) -> InputBatches:
    """Procedural images of the example's shape; random tokens where the example is of numbers.

    There are as many in a batch as `BATCH_PIXELS` allow unless `per_batch` is given. `gains` change
    the spectrum and the colours of images; None leaves them as painted. `common` are tokens that
    stand in every text.
    """
    device = device_of(model)
    example_inputs = tree_map_only(Tensor, lambda x: x.to(device), example_inputs)
    if takes_lists(example_inputs):
        batches = _image_lists(example_inputs, count or LISTED, seed, device)
        return InputBatches(batches, len(batches), True, "procedural")
    tensors = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        raise LbylError("the example inputs hold no tensor to model inputs on")
    shape = channels_first(tensors[0].shape[1:])
    total = count or image_count(shape)
    pixels = max(1, math.prod(shape[1:]))
    most = max(FEWEST_AT_ONCE, min(total, BATCH_PIXELS // pixels))
    size = per_batch or most
    text = find_text(model, example_inputs)
    if text is None and total * pixels > DRAWN_PIXELS:
        first = tensors[0].shape[0]

        def draw(number: int, count: int) -> Inputs:
            own = seed * 1_000_003 + number + 1
            like = partial(_like, total=count, batch=first, seed=own, gains=gains)
            return tree_map_only(Tensor, like, example_inputs)

        later = DrawnLater(tuple(enumerate(split_sizes(total, size))), draw)
        return InputBatches(later, len(later), True, "procedural")
    if text is not None:
        made = random_text(text, example_inputs, total, seed, common)
    else:
        like = partial(_like, total=total, batch=tensors[0].shape[0], seed=seed, gains=gains)
        made = tree_map_only(Tensor, like, example_inputs)
    batches = split(made, total, size)
    return InputBatches(batches, len(batches), True, "procedural" if text is None else RANDOM)


def _image_lists(inputs: Inputs, total: int, seed: int, device: torch.device) -> list[Inputs]:
    """Batches of lists of images between 0 and 1, which detectors normalise themselves."""
    like = inputs[0][0]
    images = procedural_images(total, tuple(like.shape), seed=seed, device=str(device)).to(like)
    images = (0.5 + 0.25 * images).clamp(0, 1)
    return [(list(part), *inputs[1:]) for part in images.split(LISTED_BATCH)]


def _like(x: Tensor, total: int, batch: int, seed: int, gains: SpectrumGains | None) -> Tensor:
    """`total` inputs like the example: images for floats, shuffled tokens for whole numbers."""
    if not x.dim() or x.shape[0] != batch:
        return x
    if x.dtype.is_floating_point and x.dim() > 1:
        shape = x.shape[1:]
        images = procedural_images(total, channels_first(shape), seed=seed, device=x.device)
        images = images if gains is None else gains(images)
        return as_given(images, channels_come_last(shape)).to(x.dtype)
    if x.is_complex():
        parts = zip((x.real, x.imag), (seed, seed + IMAGINARY))
        return torch.complex(*(_like(part, total, batch, own, gains) for part, own in parts))
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
