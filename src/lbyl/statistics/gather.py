"""One pass of the original network over images, with moments gathered at every consumer's input.

What the design must satisfy: the network is not changed, not even for the time of the pass (torch
function calls are listened to instead); memory is one batch plus the moments; every BatchNorm
normalises by the batch, so that on any images each channel has the mean and deviation it had on
the training data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lbyl.listen import Function, NormListener
from lbyl.record import Inputs, call_model, evaluation_mode
from lbyl.statistics.base import Moments, Statistics
from lbyl.surgery import tensors
from lbyl.unit import Consumer, Graph

FEATURE_LIMIT = 4608
"""Inputs × taps up to which every tap is a feature of its own (512 channels at 3×3)."""

SAMPLES_PER_FEATURE = 12
MINIMUM_SAMPLES = 1 << 16
"""Positions are thinned out to about so many samples: neighbours say little new."""

GRAM_BLOCK = 512  # columns: enough to keep every core busy

Progress = Callable[[str, int, int], None]
"""Called with the stage's name, steps done and steps in all."""

CONVOLUTIONS: dict[Callable[..., Any], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


@dataclass
class Accumulator:
    """Streaming sums of one consumer's input."""

    consumer: Consumer
    taps: int  # of the kernel
    per_tap: bool
    columns: Tensor | None
    sample_limit: int
    count: int = 0
    total: Tensor | None = None
    products: Tensor | None = None
    spatial: Tensor | None = None
    calls: int = 0

    def add(self, samples: Tensor) -> None:
        """Take samples (n, features) in; sums are kept in float64."""
        if self.total is None:
            width = samples.shape[1]
            self.total = samples.new_zeros(width, dtype=torch.float64)
            self.products = samples.new_zeros(width, width, dtype=torch.float64)
        assert self.products is not None
        self.count += samples.shape[0]
        self.total += samples.new_ones(len(samples)) @ samples
        self.products += gram(samples)

    def add_spatial(self, patches: Tensor) -> None:
        """Take patches (n, channels, taps) in, to learn how alike the taps of a channel are."""
        centred = (patches - patches.mean((0, 2), keepdim=True)).flatten(0, 1)
        product = (centred.T @ centred).double()
        self.spatial = product if self.spatial is None else self.spatial + product

    def moments(self) -> Moments:
        assert self.total is not None and self.products is not None
        mean = self.total / self.count
        covariance = self.products / self.count - torch.outer(mean, mean)
        taps = self.taps if self.per_tap else 1
        spatial = None
        if self.spatial is not None:
            spread = self.spatial.diagonal().clamp(min=1e-300).rsqrt()
            spatial = self.spatial * torch.outer(spread, spread)
        return Moments(mean.reshape(-1, taps), covariance, taps, spatial, self.columns, self.count)


def gram(rows: Tensor) -> Tensor:
    """rows' · rows; where that is large each half of the symmetric product is computed once."""
    width = rows.shape[1]
    if width <= GRAM_BLOCK:
        return rows.T @ rows
    product = rows.new_empty(width, width)
    for first in range(0, width, GRAM_BLOCK):
        stretch = slice(first, first + GRAM_BLOCK)
        part = rows[:, stretch].T @ rows[:, first:]
        product[stretch, first:] = part
        product[first:, stretch] = part.T
    return product


class Gatherer(NormListener):
    """Gathers inputs of consumers, and lets BatchNorm normalise by the batch."""

    def __init__(self, accumulators: dict[int, Accumulator], by_batch: bool, seed: int) -> None:
        super().__init__(by_batch)
        self.accumulators = accumulators  # by the id of the consumer's weight
        self.generator = torch.Generator().manual_seed(seed)

    def hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.batch_norm:
            return self.normalise(args, kwargs)
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if id(weight) in self.accumulators and (func in CONVOLUTIONS or func is F.linear):
            self._gather(func, self.accumulators[id(weight)], args, kwargs)
        elif len(args) > 2 and id(args[2]) in self.accumulators:  # addmm(bias, x, weight)
            gather_linear(self.accumulators[id(args[2])], args[1], self.generator)
        elif id(weight) in self.accumulators:
            self._gather_other(self.accumulators[id(weight)], args, kwargs)
        return func(*args, **kwargs)

    def _gather(
        self,
        func: Callable[..., Any],
        into: Accumulator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        x = args[0] if args else kwargs["input"]
        if func is F.linear:
            gather_linear(into, x, self.generator)
            return
        gather_convolution(into, x, Geometry.of(func, args, kwargs), self.generator)

    def _gather_other(
        self, into: Accumulator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A transposed convolution or a product: inputs by channel."""
        x = args[0] if args else kwargs["input"]
        if into.consumer.kind == "linear":
            gather_linear(into, x, self.generator)
        else:
            into.add(thin(x.movedim(1, -1).flatten(0, -2), into.sample_limit, self.generator))


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride, padding and dilation of a convolution, a number per dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(
        cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Geometry:
        """The geometry of one call of a convolution."""
        dims, kernel = CONVOLUTIONS[func], args[1].shape[2:]
        named = dict(zip(("stride", "padding", "dilation"), args[3:6])) | kwargs

        def each(value: Any) -> tuple[int, ...]:
            return (value,) * dims if isinstance(value, int) else tuple(value)

        stride, dilation = each(named.get("stride", 1)), each(named.get("dilation", 1))
        padding = named.get("padding", 0)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, kernel)]
            sides = tuple((t // 2, t - t // 2) for t in total)
        elif padding == "valid":
            sides = ((0, 0),) * dims
        else:
            sides = tuple((p, p) for p in each(padding))
        return cls(tuple(kernel), stride, sides, dilation)

    def positions(self, x: Tensor) -> float:
        """About how many places of a batch the kernel is applied at."""
        return x.shape[0] * math.prod(x.shape[2:]) / math.prod(self.stride)


def gather_linear(into: Accumulator, x: Tensor, generator: torch.Generator) -> None:
    """Inputs of a linear layer: (…, features), regrouped by channel where flattened."""
    rows = x.reshape(-1, x.shape[-1])
    if into.columns is None:
        into.add(thin(rows, into.sample_limit, generator))
        return
    columns = into.columns.to(x.device)
    patches = rows[:, columns.flatten()].unflatten(1, columns.shape)
    into.add_spatial(patches)
    into.add(thin(patches.transpose(1, 2).flatten(0, 1), into.sample_limit, generator))


def gather_convolution(
    into: Accumulator, x: Tensor, geometry: Geometry, generator: torch.Generator
) -> None:
    """Inputs of a convolution, at each kernel tap where that is affordable."""
    if x.dim() == len(geometry.kernel) + 1:
        x = x[None]
    if math.prod(geometry.kernel) == 1 and into.per_tap:
        for d, step in enumerate(geometry.stride):
            x = x[(slice(None),) * (2 + d) + (slice(None, None, step),)]
        into.add(thin(x.movedim(1, -1).flatten(0, -2), into.sample_limit, generator))
        return
    patches = patches_of(x, geometry, geometry.positions(x) / into.sample_limit, generator)
    if into.per_tap:
        into.add(patches.flatten(1))
        return
    into.add_spatial(patches)
    into.add(patches.transpose(1, 2).flatten(0, 1))


def thin(rows: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    """About `limit` of the rows, one drawn from each stretch of equal length.

    Every n-th row would not do: rows follow each other pixel by pixel, and a step that divides
    the width sees the same columns of every image.
    """
    step = rows.shape[0] // max(1, limit)
    if step <= 1:
        return rows
    count = rows.shape[0] // step
    places = torch.arange(count) * step + torch.randint(step, (count,), generator=generator)
    return rows[places.to(rows.device)]


def patches_of(x: Tensor, geometry: Geometry, excess: float, generator: torch.Generator) -> Tensor:
    """What the kernel sees: (positions, channels, taps), positions thinned by about `excess`."""
    dims = len(geometry.kernel)
    x = F.pad(x, [p for sides in reversed(geometry.padding) for p in sides])
    coarser = max(1, round(excess ** (1 / dims)))
    for d in range(dims):  # each dimension becomes positions here and taps at the end
        reach = geometry.dilation[d] * (geometry.kernel[d] - 1)
        count = (x.shape[2 + d] - reach - 1) // geometry.stride[d] + 1
        step = min(coarser, count)
        first = int(torch.randint(step, (), generator=generator)) * geometry.stride[d]
        x = x.narrow(2 + d, first, x.shape[2 + d] - first)
        # A view: windows that are left out are never copied.
        x = x.unfold(2 + d, reach + 1, step * geometry.stride[d])[..., :: geometry.dilation[d]]
    x = x.movedim(1, dims + 1)  # (batch, positions…, channels, taps…)
    return x.reshape(math.prod(x.shape[: dims + 1]), x.shape[dims + 1], -1)


@dataclass
class Passes:
    """The inputs of a collection: batches, and whether BatchNorm goes by the batch."""

    batches: Iterable[Inputs]
    count: int  # of batches
    batch_statistics: bool
    source: str
    seconds: dict[str, float] = field(default_factory=dict)


def run_passes(
    model: nn.Module,
    graph: Graph,
    passes: Passes,
    *,
    taps: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Run the network over the batches and return the moments at every consumer."""
    state = tensors(model)
    accumulators = {
        id(state[c.weight]): _accumulator(c, state[c.weight], taps, passes.count)
        for c in graph.consumers.values()
    }
    start = time.perf_counter()
    listener = Gatherer(accumulators, passes.batch_statistics, seed)
    with evaluation_mode(model), torch.no_grad():
        for step, batch in enumerate(passes.batches):
            with listener:
                call_model(model, batch)
            if progress:
                progress("collecting", step + 1, passes.count)
    moments = {a.consumer.name: a.moments() for a in accumulators.values() if a.count}
    seconds = {**passes.seconds, "collect": time.perf_counter() - start}
    return Statistics(moments, passes.source, seconds)


def _accumulator(consumer: Consumer, weight: Tensor, taps: str, batches: int) -> Accumulator:
    """Decide what is a feature: every tap, every input, or the channels of a flattened input."""
    inputs = weight.shape[consumer.axis]
    kernel = weight.numel() // (inputs * weight.shape[consumer.output_axis])
    fits = inputs * kernel <= FEATURE_LIMIT
    per_tap = kernel == 1 or (consumer.kind == "conv" and fits and taps != "channels")
    columns = None
    if inputs > FEATURE_LIMIT:
        columns = _flattened(consumer.channel)
    if consumer.kind == "transposed":
        per_tap = False
    features = inputs * kernel if per_tap else inputs
    features = features if columns is None else columns.shape[0]
    # Each batch takes its share, so that the total does not depend on the batch size.
    limit = max(MINIMUM_SAMPLES, SAMPLES_PER_FEATURE * features) // max(1, batches)
    return Accumulator(consumer, kernel, per_tap and columns is None, columns, limit)


def _flattened(channel: Tensor) -> Tensor | None:
    """(channels, columns each) where every channel owns equally many columns of a flatten."""
    if bool((channel < 0).any()):
        return None
    order = torch.argsort(channel, stable=True)
    _, counts = torch.unique(channel, return_counts=True)
    if len(counts) == len(channel) or bool((counts != counts[0]).any()):
        return None
    return order.reshape(len(counts), -1)
