"""Which positions of a convolution's input are looked at: windows as views, thinned out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lbyl.graph.watch import LayerCall


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

    def positions(self, x: Tensor) -> float:
        """About how many positions of a batch the kernel is applied at."""
        return x.shape[0] * math.prod(x.shape[2:]) / math.prod(self.stride)


def thin(rows: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    """About `limit` of the rows, one drawn from each stretch of equal length.

    Every n-th row would not do: rows follow each other pixel by pixel, and a step that divides
    the width sees the same columns of every image.
    """
    step = rows.shape[0] // max(1, limit)
    if step <= 1:
        return rows
    count = rows.shape[0] // step
    positions = torch.arange(count) * step + torch.randint(step, (count,), generator=generator)
    return rows[positions.to(rows.device)]


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
