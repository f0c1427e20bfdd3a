"""Which positions of a convolution's input are looked at: windows as views, thinned out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lbyl.graph.watch import LayerCall
from lbyl.runtime.tensors import onto


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride, padding and dilation of a convolution, a number per dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, call: LayerCall) -> Geometry:
        """The geometry of one call of a convolution."""
        given, kernel = call.arguments, call.weight.shape[2:]
        dims = len(kernel)

        def each(value: Any) -> tuple[int, ...]:
            return (value,) * dims if isinstance(value, int) else tuple(value)

        stride, dilation = each(given.get("stride", 1)), each(given.get("dilation", 1))
        padding = given.get("padding", 0)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, kernel)]
            sides = tuple((t // 2, t - t // 2) for t in total)
        elif padding == "valid":
            sides = ((0, 0),) * dims
        else:
            sides = tuple((p, p) for p in each(padding))
        return cls(tuple(kernel), stride, sides, dilation)


def drawn(total: int, limit: int, generator: torch.Generator) -> Tensor | None:
    """`limit` of `total` positions, one drawn from each stretch of about equal length.

    Every n-th one would not do: positions follow each other pixel by pixel, and a step that divides
    the width sees the same columns of every image. None where all are wanted.
    """
    count = max(1, limit)
    if total <= count:
        return None
    ends = torch.arange(count + 1) * total // count
    within = torch.rand(count, generator=generator, dtype=torch.float64)
    return ends[:-1] + (within * ends.diff()).long()


VALUES_AT_ONCE = 1 << 22  # of rows that are copied at a time, at least,
VALUES_ON_DEVICE = 1 << 26  # and where memory is no concern and every call takes its time


def rows_at_once(width: int, device: torch.device) -> int:
    """How many rows of features are copied at a time.

    As many as there are features take, in float32, half of the memory of their covariance; half as
    many where sums copy them once more.
    """
    if device.type != "cpu":
        return max(width, VALUES_ON_DEVICE // max(1, width))
    return max(width // 2, VALUES_AT_ONCE // max(1, width))


def thin(rows: Tensor, limit: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`limit` of the rows, all where there are fewer, in parts."""
    places = drawn(rows.shape[0], limit, generator)
    size = rows_at_once(rows.shape[1], rows.device)
    if places is None:
        yield from rows.split(size)
        return
    for some in places.split(size):
        yield rows[onto(some, rows.device)]


def pixels_of(x: Tensor, limit: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`limit` rows (positions, channels) of images (n, channels, …), drawn before copying."""
    sizes = (x.shape[0], *x.shape[2:])
    places = drawn(math.prod(sizes), limit, generator)
    size = rows_at_once(x.shape[1], x.device)
    x = x.movedim(1, -1)
    if places is None:
        yield from x.flatten(0, -2).split(size)
        return
    for some in places.split(size):
        yield x[_coordinates(some, sizes, x.device)]


def _coordinates(places: Tensor, sizes: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Places by dimension."""
    places, found = onto(places, device), []
    for size in reversed(sizes[1:]):
        found.append(places % size)
        places = places // size
    return places, *reversed(found)


def patches_of(
    x: Tensor, geometry: Geometry, limit: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """What the kernel sees, in parts: (positions, channels, taps), `limit` positions in all.

    In memory channels come last where they do so in the images: windows are runs of channels then.
    """
    dims = len(geometry.kernel)
    innermost = x.dim() == 4 and x.device.type == "cpu"
    if innermost:
        x = x.contiguous(memory_format=torch.channels_last)
    x = F.pad(x, [p for sides in reversed(geometry.padding) for p in sides])
    for d in range(dims):  # each dimension becomes positions here and taps at the end
        reach = geometry.dilation[d] * (geometry.kernel[d] - 1)
        # A view: windows that are left out are never copied.
        x = x.unfold(2 + d, reach + 1, geometry.stride[d])[..., :: geometry.dilation[d]]
    channels, sizes = x.shape[1], (x.shape[0], *x.shape[2 : dims + 2])
    x = x.movedim(1, -1 if innermost else dims + 1)  # (batch, positions…, channels and taps…)
    total = math.prod(sizes)
    places = drawn(total, limit, generator)
    if places is None:
        places = torch.arange(total)
    for some in places.split(rows_at_once(channels * math.prod(geometry.kernel), x.device)):
        seen = x[_coordinates(some, sizes, x.device)]
        if innermost:
            yield seen.reshape(len(some), -1, channels).transpose(1, 2)
        else:
            yield seen.reshape(len(some), channels, -1)
