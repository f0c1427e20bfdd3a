"""One pass of the original network over images, with moments gathered at every consumer's input.

What the design must satisfy: the network is not changed, not even for the time of the pass (torch
function calls are intercepted instead); memory is one batch plus the moments; every BatchNorm
normalises by the batch, so that on any images each channel has the mean and deviation it had on
the training data.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.unit import Consumer, Graph, Unit
from lbyl.graph.watch import LayerCall, Watch
from lbyl.inputs.batches import InputBatches
from lbyl.runtime.assumptions import assuming, holds
from lbyl.runtime.heap import look_at_idle_memory
from lbyl.runtime.intercept import Function
from lbyl.runtime.memory import free_bytes
from lbyl.runtime.notes import Note, at, note, noting
from lbyl.runtime.processes import agreed, gathered, largest, several, share, summed
from lbyl.runtime.run import Inputs, Progress, call_model, device_of, evaluation_mode
from lbyl.runtime.session import threads_for
from lbyl.runtime.tensors import finite_each, numbers
from lbyl.statistics.match import match_running_stats
from lbyl.statistics.moments import TAPS, Moments, Statistics
from lbyl.statistics.on_disk import Stored, in_parts
from lbyl.statistics.products import (
    FUNCTIONS,
    ProductSums,
    allowed_keys,
    pairs_of,
    query_and_key,
)
from lbyl.statistics.samples import Geometry, patches_of, pixels_of, thin
from lbyl.statistics.solve import add_gram, mirror, regroup
from lbyl.statistics.windows import add_windows, are_cheaper

FEATURE_LIMIT = 4608
"""Inputs × taps up to which every tap is a feature of its own (512 channels at 3×3)."""

FEWEST_PER_FEATURE = 1
"""Windows for every feature from which taps are worth telling apart: fewer have no covariance of
full rank, and that of their channels, with as many windows for a ninth of the features, says as
much."""

SAMPLES_PER_FEATURE = 12
FEWEST_SAMPLES, MOST_SAMPLES, SAMPLED_VALUES = 1 << 14, 1 << 16, 1 << 23
"""Positions are thinned out: neighbours are nearly alike.

What a regression loses to a finite sample is about features/samples of what it misses anyway. Few
features take more than that asks for, up to `MOST_SAMPLES`, for they cost little.
"""

PRIOR, UNSUITED = 64, 16  # own inputs that data-free ones count for, beside them;
SPEAKING = 1024  # from so many on own inputs speak for themselves

FORGOTTEN = (
    "statistics are those of painted images alone: nothing in this network tells what its channels "
    "were like (BatchNorm was folded, as in most ONNX files?); data= of 64 inputs would keep more"
)

OTHER_SCALE = 6.0  # times the deviation that is asked for, or a part of it, is no chance

FEWEST_TOGETHER = 32  # images, for BatchNorm by the batch, however short memory is
ACTIVATIONS = 3  # of the widest layer that are held at once: what it reads, what it makes, a copy

HALF = (torch.float16, torch.bfloat16)
SMALLEST_SQUARE = 1e-28  # sums of squares below it lose digits in float32
LARGEST_SUM = 1e38  # and above it they do not fit


@dataclass
class Accumulator:
    """Streaming sums of one consumer's input."""

    consumer: Consumer
    taps: int  # of the kernel
    per_tap: bool
    columns: Tensor | None
    sample_limit: int
    features: int = 0  # rows of its covariance, as far as known before
    count: int = 0
    total: Tensor | None = None
    products: Tensor | None = None
    spatial: Tensor | None = None
    taps_first: bool = False  # whether sums are by tap and channel, not by channel and tap

    def add(self, samples: Tensor) -> None:
        """Take samples (n, features) in; sums are kept in float64."""
        total, products = self._sums(samples, samples.shape[1])
        samples = _for_sums(samples)
        self.count += samples.shape[0]
        total += samples.new_ones(len(samples)) @ samples
        add_gram(products, samples)

    def _sums(self, like: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The sums so far, which begin with nothing."""
        if self.total is None or self.products is None:
            self.total = like.new_zeros(width, dtype=torch.float64)
            self.products = like.new_zeros(width, width, dtype=torch.float64)
        return self.total, self.products

    def add_windows(self, x: Tensor, geometry: Geometry) -> None:
        """Take all windows of images (n, channels, height, width) in."""
        self.taps_first = True
        sums = self._sums(x, x.shape[1] * math.prod(geometry.kernel))
        self.count += add_windows(*sums, _for_sums(x), geometry)

    def add_patches(self, patches: Tensor) -> None:
        """Take patches (n, channels, taps) in, every tap of a channel a feature of its own."""
        self.taps_first = patches.shape[2] > 1 and patches.stride(1) == 1
        # In the order of memory, which is the same every time: moments are put in order at last.
        self.add((patches.transpose(1, 2) if self.taps_first else patches).flatten(1))

    def add_spatial(self, patches: Tensor) -> None:
        """Take patches (n, channels, taps) in, for the correlation between taps."""
        patches = _for_sums(patches)
        centred = (patches - patches.mean((0, 2), keepdim=True)).flatten(0, 1)
        product = (centred.T @ centred).double()
        self.spatial = product if self.spatial is None else self.spatial + product

    def sum_over_processes(self, device: torch.device) -> None:
        """Add what other processes have seen; whoever saw nothing adds nothing."""
        width = largest(0 if self.total is None else len(self.total), device)
        taps = largest(0 if self.spatial is None else len(self.spatial), device)
        self.count = sum(gathered(self.count))
        self.taps_first = any(gathered(self.taps_first))
        if not width:
            return
        empty = torch.zeros(0, dtype=torch.float64, device=device)
        self.total = summed(empty.new_zeros(width) if self.total is None else self.total)
        new = empty.new_zeros(width, width) if self.products is None else self.products
        self.products = summed(new)
        if taps:
            mine = empty.new_zeros(taps, taps) if self.spatial is None else self.spatial
            self.spatial = summed(mine)

    def moments(self) -> Moments:
        assert self.total is not None and self.products is not None
        mean = self.total / self.count
        # In place: the sums have served, and a second matrix of that size need not be held.
        covariance = mirror(self.products).div_(self.count).addr_(mean, mean, alpha=-1)
        self.products = None
        taps = self.taps if self.per_tap else 1
        if self.taps_first:
            mean = mean.reshape(taps, -1).T
            regroup(covariance, taps)
        spatial = None
        if self.spatial is not None:
            inverse_std = self.spatial.diagonal().clamp(min=1e-300).rsqrt()
            spatial = self.spatial * torch.outer(inverse_std, inverse_std)
        return Moments(mean.reshape(-1, taps), covariance, taps, spatial, self.columns)


def _for_sums(samples: Tensor) -> Tensor:
    """Samples with as many digits as sums of their squares need.

    Float32 will do where squares are neither too small for it nor, in all, too large; what is not
    a number is neither.
    """
    if samples.dtype in HALF:
        samples = samples.float()
    if not samples.numel():
        return samples
    low, high = torch.aminmax(samples)
    square = torch.maximum(-low, high).double().square()
    fits = holds((square > SMALLEST_SQUARE) & (square * samples.numel() < LARGEST_SUM))
    return samples if fits else samples.double()


class Collector(Watch):
    """Adds up what consumers read."""

    def __init__(
        self, model: nn.Module, accumulators: Mapping[str, Accumulator], by_batch: bool, seed: int
    ) -> None:
        super().__init__(model, [a.consumer for a in accumulators.values()], by_batch)
        self.accumulators = accumulators
        self.generator = torch.Generator().manual_seed(seed)
        self.shown: list[Tensor] = []  # masks of the batch: tokens that are no padding
        self.products: dict[tuple[str, int], tuple[Unit, ProductSums]] = {}
        self.sums: dict[str, ProductSums] = {}  # by unit
        self.calls: dict[str, int] = {}  # of products so far, in one run

    def watch_products(self, unit: Unit, sums: ProductSums) -> None:
        """Also add up what queries and keys make, wherever this unit's are multiplied."""
        assert unit.attention is not None
        self.sums[unit.name] = sums
        self.products |= dict.fromkeys(unit.attention.products, (unit, sums))

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if self.products and name in FUNCTIONS:
            number = self.calls.get(name, 0)
            self.calls[name] = number + 1
            if (name, number) in self.products:
                self._gather_products(*self.products[name, number], name, args, kwargs)
        return super().on_call(func, args, kwargs)

    def _gather_products(
        self, unit: Unit, sums: ProductSums, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        assert unit.attention is not None
        heads, width = unit.attention.query.shape
        pair = query_and_key(name, args, kwargs, heads, width)
        if pair is None:
            return
        kernel = name == "scaled_dot_product_attention"
        shape = torch.Size((pair[0].shape[2], pair[1].shape[2]))
        mask = allowed_keys(args, kwargs, shape, heads) if kernel else None
        scale = kwargs.get("scale") or width**-0.5
        sums.add(*pair, mask, scale if kernel else width**-0.5, self.generator)

    def before_layer(self, consumer: Consumer, call: LayerCall) -> None:
        if call.x.device.type == "cpu":  # what a device frees is none of the processor's
            look_at_idle_memory()
        into = self.accumulators[consumer.name]
        if call.kind == "linear":
            mask = next((m for m in self.shown if m.shape == call.x.shape[:-1]), None)
            gather_linear(into, call.x if mask is None else call.x[mask], self.generator)
        elif call.kind == "conv":
            gather_convolution(into, call.x, Geometry.of(call), self.generator)
        else:  # transposed: inputs by channel
            for rows in pixels_of(call.x, into.sample_limit, self.generator):
                into.add(rows)


def gather_linear(into: Accumulator, x: Tensor, generator: torch.Generator) -> None:
    """Inputs of a linear layer: (…, features), regrouped by channel where flattened."""
    rows = x.reshape(-1, x.shape[-1])
    if into.columns is not None:
        columns = into.columns.to(x.device)
        patches = rows[:, columns.flatten()].unflatten(1, columns.shape)
        into.add_spatial(patches)
        rows = patches.transpose(1, 2).flatten(0, 1)
    for some in thin(rows, into.sample_limit, generator):
        into.add(some)


def gather_convolution(
    into: Accumulator, x: Tensor, geometry: Geometry, generator: torch.Generator
) -> None:
    """Inputs of a convolution, at each kernel tap where that is affordable."""
    if x.dim() == len(geometry.kernel) + 1:
        x = x[None]
    if math.prod(geometry.kernel) == 1 and into.per_tap:
        for d, step in enumerate(geometry.stride):
            x = x[(slice(None),) * (2 + d) + (slice(None, None, step),)]
        for rows in pixels_of(x, into.sample_limit, generator):
            into.add(rows)
        return
    if into.per_tap and are_cheaper(x, geometry, into.sample_limit):
        into.add_windows(x, geometry)
        return
    for patches in patches_of(x, geometry, into.sample_limit, generator):
        if into.per_tap:
            into.add_patches(patches)
        else:
            into.add_spatial(patches)
            into.add(patches.transpose(1, 2).flatten(0, 1))


def collect(
    model: nn.Module,
    graph: Graph,
    inputs: InputBatches,
    *,
    prior: InputBatches | None = None,
    taps: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Run `model` over the batches once: the moments at every consumer, good for every later use.

    Moments on data-free inputs are corrected by the running statistics of BatchNorm; those of a
    user's own are not. With data-free inputs as a `prior`, own ones count for as many as there are
    and the prior for `PRIOR` (or `UNSUITED`): few inputs have covariances of a rank below the
    number of channels, by which everything beyond it looks redundant. Where moments would take
    more than half of the memory that is free, the model runs several times, each for as many
    consumers as fit, and they wait on the disk.
    """
    if taps not in TAPS:
        raise LbylError(f"taps is {taps!r}: it must be 'auto' or 'channels'")
    start = time.perf_counter()
    device = device_of(model)
    room = int(agreed(float(free_bytes(device) // 2)))
    sources = [inputs] if prior is None else [inputs, prior]
    examples = _examples(sources)
    sizes = _sizes(graph, inputs, taps, examples)
    groups = in_parts(sizes, room // len(sources)) or [[]]
    stored = None
    if len(groups) > 1:
        stored = Stored(device, room // 2)
        # Activations take half as much as the largest statistics.
        most = max(FEWEST_TOGETHER, max(sizes.values()) // (2 * _held_each(graph)))
        sources = [some.at_most(most) for some in sources]
    parts = []
    with noting() as notes:
        if graph.forgot and inputs.source == "procedural":
            note(FORGOTTEN)
        if prior is not None:
            _compare_strength(inputs, prior)
        for number, names in enumerate(groups):
            told = _as_part(progress, number, len(groups))
            part = _collect_part(model, graph, sources, names, examples, taps, seed, told)
            # By the same name, so that nothing holds the moments while the next are collected.
            part = part if stored is None else _put_away(part, stored)
            parts.append(part)
    every = [line for lines in gathered(list(notes)) for line in lines]
    return replace(
        parts[0],
        moments=parts[0].moments if stored is None else stored,
        products={name: one for part in parts for name, one in part.products.items()},
        fallbacks=tuple(dict.fromkeys(every)),
        seconds={**parts[0].seconds, "collect": time.perf_counter() - start},
    )


def _collect_part(
    model: nn.Module,
    graph: Graph,
    sources: Sequence[InputBatches],
    consumers: Sequence[str],
    examples: int | None,
    taps: str,
    seed: int,
    progress: Progress | None,
) -> Statistics:
    """The moments at some consumers: on a user's own inputs, the first, blended with others."""
    made: Statistics | None = None
    for turn, inputs in enumerate(sources):
        own = inputs.source == "own"  # whoever loads those may want all threads
        told = _as_part(progress, turn, len(sources))
        with nullcontext() if own else threads_for(device_of(model)):
            part = collect_moments(
                model, graph, inputs, consumers, examples, taps=taps, seed=seed, progress=told
            )
            part = part if own else match_running_stats(model, graph, part)
        made = part if made is None else made.blended(part, own_weight(graph, sources[0]))
    assert made is not None
    return made


def own_weight(graph: Graph, inputs: InputBatches) -> float:
    """What a user's own inputs count for, beside data-free ones.

    Those count for fewer where the network has forgotten what they should be like.
    """
    count = _own_count(inputs)
    return count / (count + (UNSUITED if graph.forgot else PRIOR))


def speak_for_themselves(inputs: InputBatches) -> bool:
    """Whether a user's own inputs are so many that nothing data-free is wanted beside them."""
    return _own_count(inputs) >= SPEAKING


def _own_count(inputs: InputBatches) -> int:
    """Examples; batches where those do not tell."""
    return inputs.examples or inputs.count


def _examples(sources: Sequence[InputBatches]) -> int | None:
    """How many there are in all; None where some do not tell."""
    counts = [inputs.examples for inputs in sources]
    return None if None in counts else sum(count or 0 for count in counts)


def _compare_strength(inputs: InputBatches, prior: InputBatches) -> None:
    """Note where own images are far stronger or weaker than the network seems to take them."""
    own, drawn = (next(iter(some.batches)) for some in (inputs, prior))
    images = all(isinstance(x, Tensor) and x.dim() == 4 for x in (own, drawn))
    if not images or not own.is_floating_point() or prior.source != "procedural":
        return
    mine, asked = (float(x.float().std()) for x in (own, drawn))
    if not 1 / OTHER_SCALE < mine / max(asked, 1e-30) < OTHER_SCALE:
        note(
            f"the images of data= have a deviation of {mine:.3g}, where the network's first layer "
            f"asks for about {asked:.3g}: are they normalised as it was trained (--mean, --std)?"
        )


def _put_away(part: Statistics, stored: Stored) -> Statistics:
    """Statistics without their moments, which go to the disk."""
    stored.add(part.moments)
    return replace(part, moments={})


def _sizes(graph: Graph, inputs: InputBatches, taps: str, examples: int | None) -> dict[str, int]:
    """Consumer → the bytes of its second moments."""
    made = _accumulators(graph, graph.consumers, inputs, taps, examples)
    return {name: 8 * accumulator.features**2 for name, accumulator in made.items()}


def _held_each(graph: Graph) -> int:
    """Bytes of the activations that one example has at once."""
    made = (n.positions * graph.shapes[n.weight][n.output_axis] for n in graph.layers)
    return ACTIVATIONS * 4 * max(1, max(made, default=0) // graph.batch)


def _as_part(progress: Progress | None, number: int, parts: int) -> Progress | None:
    """Reports of one part of a collection as reports of all of it."""
    if progress is None:
        return None
    return lambda stage, step, steps: progress(stage, number * steps + step, parts * steps)


def collect_moments(
    model: nn.Module,
    graph: Graph,
    inputs: InputBatches,
    consumers: Iterable[str] | None = None,
    examples: int | None = None,
    *,
    taps: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Run the network over the batches and return the moments at every consumer, or at some.

    Consumers whose inputs are not finite have none. `examples` are those of all inputs that moments
    are blended of, where there are others.
    """
    start = time.perf_counter()
    chosen = list(graph.consumers if consumers is None else consumers)
    examples = inputs.examples if examples is None else examples
    run = partial(_run_over, model, graph, chosen, inputs, examples, taps, seed, progress)
    collector = _looked_at_last(run) if device_of(model).type != "cpu" else run()
    accumulators, sums = collector.accumulators, collector.sums
    if several():
        device = device_of(model)
        for accumulator in accumulators.values():
            accumulator.sum_over_processes(device)
        for product_sums in sums.values():
            product_sums.sum_over_processes()
    moments = {a.consumer.name: a.moments() for a in accumulators.values() if a.count}
    for name in [a.consumer.name for a in accumulators.values() if not a.count]:
        with at(name):
            note("it has no statistics: no input reaches it")
    finite = finite_each([m.numbers for m in moments.values()])
    for name in [name for name, good in zip(moments, finite) if not good]:
        with at(name):
            note("it has no statistics: its inputs are not finite")
        del moments[name]
    seconds = {**inputs.seconds, "collect": time.perf_counter() - start}
    products = {name: s.moments() for name, s in sums.items()}
    measured_products = {name: m for name, m in products.items() if m is not None}
    return Statistics(moments, inputs.source, seconds, products=measured_products)


def _looked_at_last(run: Callable[[], Collector]) -> Collector:
    """A run on a device, which is asked once, after it, whether float32 was enough for the sums.

    The processor is asked every time, which costs it nothing.
    """
    with assuming() as conditions:
        collector = run()
    return collector if all(numbers(conditions)) else run()


def _run_over(
    model: nn.Module,
    graph: Graph,
    consumers: Sequence[str],
    inputs: InputBatches,
    examples: int | None,
    taps: str,
    seed: int,
    progress: Progress | None,
) -> Collector:
    """What the network shows on the batches, added up."""
    accumulators = _accumulators(graph, consumers, inputs, taps, examples)
    collector = Collector(model, accumulators, inputs.batch_statistics, seed)
    first = not consumers or consumers[0] == next(iter(graph.consumers))
    for unit in graph.units if first else ():
        if unit.kind == "qk" and unit.attention is not None:
            collector.watch_products(unit, ProductSums(pairs_of(graph, unit), unit.attention.plain))
    with evaluation_mode(model), torch.no_grad():
        for step, batch in share(inputs.batches):
            # What is drawn of a batch does not depend on who ran those before it.
            collector.generator.manual_seed(seed * 1_000_003 + step)
            collector.calls.clear()
            collector.shown = padding_masks(batch)
            with collector:
                call_model(model, batch)
            if progress:
                progress("collecting", step + 1, inputs.count)
    return collector


def padding_masks(batch: Inputs) -> list[Tensor]:
    """Masks (sequences, length) among inputs by name that hide some tokens, and not all."""
    if not isinstance(batch, Mapping):
        return []
    named = [x for name, x in batch.items() if name.endswith("mask") and isinstance(x, Tensor)]
    masks = [x != 0 for x in named if x.dim() == 2]
    return [m for m in masks if bool(m.any()) and not bool(m.all())]


def _accumulators(
    graph: Graph, names: Iterable[str], inputs: InputBatches, taps: str, examples: int | None
) -> dict[str, Accumulator]:
    """By consumer, with nothing added up yet."""
    positions: Counter[str] = Counter()
    for layer in graph.layers:
        positions[layer.weight] += layer.positions
    made = {}
    for consumer in map(graph.consumers.__getitem__, names):
        shape, windows = graph.shapes[consumer.weight], None
        if examples is not None:
            windows = examples * positions[consumer.weight] // graph.batch
        made[consumer.name] = _accumulator(consumer, shape, taps, inputs.count, windows)
    return made


def _accumulator(
    consumer: Consumer,
    shape: Sequence[int],
    taps: str,
    batches: int,
    windows: int | None = None,
) -> Accumulator:
    """Decide what is a feature: every tap, every input, or the channels of a flattened input.

    `shape` is that of the consumer's weight, `windows` how often it will be applied in all, where
    that is known.
    """
    inputs = shape[consumer.axis]
    kernel = consumer.taps(shape)
    features = inputs * kernel
    enough = windows is None or windows >= FEWEST_PER_FEATURE * features
    affordable = features <= FEATURE_LIMIT and enough and taps != "channels"
    per_tap = kernel == 1 or (consumer.kind == "conv" and affordable)
    columns = None
    if inputs > FEATURE_LIMIT:
        columns = consumer.flattened_columns()
    if consumer.kind == "transposed":
        per_tap = False
    features = inputs * kernel if per_tap else inputs
    features = features if columns is None else columns.shape[0]
    # Each batch takes its fraction, so that the total does not depend on the batch size.
    limit = sample_limit(features) // max(1, batches)
    return Accumulator(consumer, kernel, per_tap and columns is None, columns, limit, features)


def sample_limit(features: int) -> int:
    """How many samples are enough for so many features."""
    cheap = min(MOST_SAMPLES, SAMPLED_VALUES // max(1, features))
    return max(FEWEST_SAMPLES, SAMPLES_PER_FEATURE * features, cheap)


def check_statistics(graph: Graph, statistics: Statistics) -> None:
    """One clear error for statistics that were collected on another network."""
    if statistics.moments and not any(name in statistics.moments for name in graph.consumers):
        raise LbylError("the statistics belong to another model: they know none of its layers")
    for name, consumer in graph.consumers.items():
        moments = statistics.outlines.get(name)
        if moments is None:
            continue
        shape = graph.shapes[consumer.weight]
        inputs = shape[consumer.axis]
        taps = consumer.taps(shape)
        columns = moments.columns
        collected = len(moments.mean) if columns is None else columns.numel()
        if collected != inputs or moments.taps not in (1, taps):
            raise LbylError(
                f"the statistics belong to another model: {name} reads {inputs} inputs at {taps} "
                f"taps, they were collected over {collected} at {moments.taps}"
            )


def check_complete(graph: Graph, statistics: Statistics) -> None:
    """One clear error for statistics of fewer layers: what those lose would not be restored."""
    if statistics.source == "analytic":  # the weights do not tell them all
        return
    known = {*statistics.moments, *(Note.read(line).layer for line in statistics.fallbacks)}
    missing = [name for name in graph.consumers if name not in known]
    if missing:
        raise LbylError(
            f"the statistics given with data= know nothing of {', '.join(missing[:4])}: collect "
            "them with the same residual="
        )
