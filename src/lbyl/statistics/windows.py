"""Second moments of a convolution's windows, of all positions, without the windows.

Two taps of a window see the map and the map moved by a few pixels, and many pairs of taps see it
moved by the same lag. So what pixels that far apart multiply to is summed once for every lag, apart
for the stretches of rows and columns at the borders, where windows of some taps end. A kernel of
3×3 has 45 pairs of taps and 13 lags.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lbyl.runtime.rows import row_products
from lbyl.statistics.samples import Geometry

HALF = 0.56  # of a symmetric product that is computed by blocks
WORTH = 0.7  # of the multiplications that rows would take: single products are small


@dataclass(frozen=True)
class Stretches:
    """Along one dimension, for one lag: stretches of positions, and which of them each tap sees."""

    ends: list[tuple[int, int]]
    seen: dict[int, list[bool]]  # tap whose partner, `lag` taps on, is in the kernel too

    @classmethod
    def of(cls, geometry: Geometry, dim: int, side: int, lag: int) -> Stretches:
        kernel, step = geometry.kernel[dim], geometry.dilation[dim]
        before = geometry.padding[dim][0]
        made = outputs(geometry, dim, side)
        boxes = {}
        for tap in range(max(0, -lag), min(kernel, kernel - lag)):
            first = step * tap - before  # of the map, that this tap sees
            low = max(0, first, -step * lag)
            boxes[tap] = low, max(low, min(side, first + made, side - step * lag))
        ends = list(itertools.pairwise(sorted({end for box in boxes.values() for end in box})))
        seen = {t: [low <= a and b <= high for a, b in ends] for t, (low, high) in boxes.items()}
        return cls(ends, seen)

    @property
    def positions(self) -> int:
        return sum(b - a for a, b in self.ends)


def outputs(geometry: Geometry, dim: int, side: int) -> int:
    """How many positions a convolution of stride 1 has along one dimension."""
    reach = geometry.dilation[dim] * (geometry.kernel[dim] - 1)
    return max(0, side + sum(geometry.padding[dim]) - reach)


def lags(geometry: Geometry) -> Iterator[tuple[int, int]]:
    """Of two taps, the second of which does not come before the first."""
    height, width = geometry.kernel
    for down in range(height):
        for right in range(1 - width if down else 0, width):
            yield down, right


def are_cheaper(x: Tensor, geometry: Geometry, rows: int) -> bool:
    """Whether sums over all windows take fewer multiplications than so many rows of windows do."""
    plain = len(geometry.kernel) == 2 and set(geometry.stride) == {1}
    if not plain or x.device.type != "cpu":
        return False
    count, sides = len(x), x.shape[2:]
    pairs = sum(
        math.prod(Stretches.of(geometry, d, sides[d], lag[d]).positions for d in (0, 1))
        for lag in lags(geometry)
    )
    rows = min(rows, count * math.prod(outputs(geometry, d, sides[d]) for d in (0, 1)))
    taps = math.prod(geometry.kernel)
    return pairs * count < WORTH * HALF * rows * taps**2


def add_windows(total: Tensor, products: Tensor, x: Tensor, geometry: Geometry) -> int:
    """Add sums over all windows of x (n, channels, height, width), features by tap and channel.

    `products` are added to on and right of the diagonal only. Returns how many windows there are.
    """
    count, channels, *sides = x.shape
    x = x.permute(2, 3, 0, 1).contiguous()  # pixels of one row beside each other: nothing is copied
    width = geometry.kernel[1]
    for lag in lags(geometry):
        down, right = (Stretches.of(geometry, d, sides[d], lag[d]) for d in (0, 1))
        taps = [(a, b) for a in down.seen for b in right.seen]
        if not taps or not down.ends or not right.ends:
            continue
        seen = [[a and b for a in down.seen[t] for b in right.seen[u]] for t, u in taps]
        move = tuple(geometry.dilation[d] * lag[d] for d in (0, 1))
        cells = _cells(x, down, right, move)
        blocks = (torch.tensor(seen).to(cells) @ cells.flatten(1)).unflatten(1, cells.shape[1:])
        for (t, u), block in zip(taps, blocks):
            first = t * width + u
            second = first + lag[0] * width + lag[1]
            here = slice(first * channels, (first + 1) * channels)
            there = slice(second * channels, (second + 1) * channels)
            products[here, there] += block
    _add_total(total, x, geometry)
    return count * math.prod(outputs(geometry, d, sides[d]) for d in (0, 1))


def _cells(x: Tensor, down: Stretches, right: Stretches, move: tuple[int, ...]) -> Tensor:
    """(cells, channels, channels): products of pixels with those a move away, by stretches."""
    channels = x.shape[-1]
    cells = x.new_zeros(len(down.ends) * len(right.ends), channels, channels)
    for cell, ((top, bottom), (left, end)) in zip(cells, itertools.product(down.ends, right.ends)):
        for y in range(top, bottom):
            one = x[y, left:end].reshape(-1, channels)
            other = x[y + move[0], left + move[1] : end + move[1]].reshape(-1, channels)
            cell += row_products(one, other)
    return cells


def _add_total(total: Tensor, x: Tensor, geometry: Geometry) -> None:
    """Sums of what every tap sees, by tap and channel."""
    channels = x.shape[-1]
    pixels = x.sum(2).double()  # (height, width, channels)
    down, right = (Stretches.of(geometry, d, x.shape[d], 0) for d in (0, 1))
    for number, (t, u) in enumerate(itertools.product(down.seen, right.seen)):
        for (top, bottom), rows in zip(down.ends, down.seen[t]):
            for (left, end), columns in zip(right.ends, right.seen[u]):
                if rows and columns:
                    here = slice(number * channels, (number + 1) * channels)
                    total[here] += pixels[top:bottom, left:end].sum((0, 1))
