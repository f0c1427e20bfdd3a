"""Dead leaves: opaque shapes that hide one another, radius density ∝ r⁻³."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lbyl.inputs.images.noise import Size, uniform

FEWEST_PIXELS = 1.5  # of radius: below that a leaf is a speck of noise
LAYERS_OF_LEAVES = 4.0  # how often a pixel is covered on average: e⁻⁴ = 2 % see the background
CHUNK_PIXELS = {"cpu": 1 << 20}  # the CPU's cache decides; an accelerator takes far more at once
CHUNK_PIXELS_ELSEWHERE = 1 << 25


def dead_leaves(
    count: int,
    channels: int,
    size: Size,
    generator: torch.Generator,
    ends: tuple[float, float],
    own_colour: float,
) -> Tensor:
    """Images (count, channels, height, width) of discs and rectangles, each of one colour.

    `ends` are the smallest and the largest radius, of the shorter side; `own_colour` is what a
    channel has besides the grey common to all.
    """
    height, width = size
    leaves = _leaf_count(height, width, ends)
    outlines = _outlines(count, leaves, height, width, ends, generator)
    grey = uniform((count, 1, leaves + 1), generator)
    own = uniform((count, channels, leaves + 1), generator)
    colours = grey + own_colour * own
    images = torch.empty((count, channels, height * width), device=generator.device)
    for part in _chunks(count, height * width, generator.device):
        labels = _frontmost(outlines[:, part], height, width).flatten(1).long()
        torch.gather(
            colours[part], 2, labels.unsqueeze(1).expand(-1, channels, -1), out=images[part]
        )
    return images.view(count, channels, height, width)


def _radii(uniform: Tensor, height: int, width: int, ends: tuple[float, float]) -> Tensor:
    """Density ∝ r⁻³ by inversion: r⁻² is uniform between its two ends."""
    side = min(height, width)
    smallest = max(FEWEST_PIXELS, side * ends[0])
    largest = max(1.5 * smallest, side * ends[1])
    return torch.lerp(
        torch.full_like(uniform, largest**-2), torch.full_like(uniform, smallest**-2), uniform
    ).rsqrt()


def _leaf_count(height: int, width: int, ends: tuple[float, float]) -> int:
    """As many leaves as cover a pixel ``LAYERS_OF_LEAVES`` times on average."""
    radius = _radii((torch.arange(256) + 0.5) / 256, height, width, ends)
    covering = math.pi * radius.square() / ((height + 2 * radius) * (width + 2 * radius))
    # Labels are int16; a very long strip of an image has to do with fewer layers.
    return min(32_000, math.ceil(LAYERS_OF_LEAVES / covering.mean().item()))


def _outlines(
    count: int,
    leaves: int,
    height: int,
    width: int,
    ends: tuple[float, float],
    generator: torch.Generator,
) -> Tensor:
    """(7, count, leaves): centre y, x; half height; then what a row's span is computed from.

    A disc has its radius and zeros; a rectangle has its two half sides and its sine and cosine.
    """
    u = torch.rand((7, count, leaves), device=generator.device, generator=generator)
    radius = _radii(u[0], height, width, ends)
    y = u[1] * (height + 2 * radius) - radius
    x = u[2] * (width + 2 * radius) - radius
    # Rectangles have the area of the disc and sides of ratio 1/2 to 2; half of them lie square.
    stretch = torch.exp2(u[3] - 0.5)
    along, across = (radius * math.sqrt(math.pi / 4) * s for s in (stretch, 1 / stretch))
    angle = torch.where(u[4] < 0.5, torch.zeros_like(u[5]), u[5] * math.pi)
    sine, cosine = angle.sin(), angle.cos()
    disc = u[6] < 0.5
    half_height = torch.where(disc, radius, along * sine.abs() + across * cosine.abs())
    zero = torch.zeros_like(radius)
    return torch.stack(
        [
            y,
            x,
            half_height,
            torch.where(disc, radius, along),
            torch.where(disc, zero, across),
            torch.where(disc, zero, sine),
            torch.where(disc, zero, cosine),
        ]
    )


def _frontmost(outlines: Tensor, height: int, width: int) -> Tensor:
    """Label every pixel with the highest leaf (1-based) that covers it, 0 where none does.

    A convex shape meets a row in one span, and a span is the union of two blocks whose length is a
    power of two. So each row of each leaf is two writes into a table with one level per power, and
    handing every level down to the one below paints all pixels. A maximum does not care for order,
    so this is exact, deterministic on every device, and its cost does not grow with leaf area.
    """
    count, leaves = outlines.shape[1:]
    levels = width.bit_length()
    table = torch.zeros((levels, count, height, width), dtype=torch.int16, device=outlines.device)
    shape, row = _rows(outlines, height)
    start, stop = _spans(outlines.flatten(1)[:, shape], row, width)
    length = stop - start
    label = torch.where(length > 0, shape % leaves + 1, 0).to(torch.int16)  # 0 writes nothing
    level = torch.frexp(length.clamp_min(1).float()).exponent.long() - 1
    block = torch.bitwise_left_shift(torch.ones_like(level), level)
    line = ((level * count + shape // leaves) * height + row) * width
    flat = table.view(-1)
    for begin in (start, stop - block):
        flat.scatter_reduce_(0, line + begin.clamp(0, width - 1), label, "amax")
    for upper in range(levels - 1, 0, -1):
        half = 1 << (upper - 1)
        lower = table[upper - 1]
        torch.maximum(lower, table[upper], out=lower)
        right = lower[..., half:]
        torch.maximum(right, table[upper][..., :-half], out=right)
    return table[0]


def _rows(outlines: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Every (leaf, row) pair in which the leaf may have pixels, all images in one list."""
    y, _, half_height = outlines[:3].flatten(1)
    first = (y - half_height - 0.5).ceil().clamp(0, height).long()
    rows = ((y + half_height - 0.5).floor().clamp(-1, height - 1).long() + 1 - first).clamp_min(0)
    shape = torch.repeat_interleave(rows)
    # Position in the list minus where the leaf's own rows begin, plus its first row.
    row = torch.arange(len(shape), device=y.device) + (first - rows.cumsum(0) + rows)[shape]
    return shape, row


def _spans(outline: Tensor, row: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Pixels ``start:stop`` whose centres the outline covers in its row (stop <= start: none)."""
    y, x, _, along, across, sine, cosine = outline
    dy = row + 0.5 - y
    half = (along.square() - dy.square()).clamp_min(0).sqrt()
    # A rectangle is the crossing of two slanted strips; the clamp makes a level strip very wide.
    sine, cosine = (
        sine.clamp_min(1e-6),
        torch.where(cosine < 0, -1, 1) * cosine.abs().clamp_min(1e-6),
    )
    middle_a, half_a = -dy * sine / cosine, along / cosine.abs()
    middle_b, half_b = dy * cosine / sine, across / sine
    left = torch.maximum(middle_a - half_a, middle_b - half_b)
    right = torch.minimum(middle_a + half_a, middle_b + half_b)
    disc = across == 0
    left, right = torch.where(disc, -half, left), torch.where(disc, half, right)
    start = (x + left - 0.5).ceil().clamp(0, width).long()
    stop = ((x + right - 0.5).floor() + 1).clamp(0, width).long()
    return start, stop


def _chunks(count: int, pixels: int, device: torch.device) -> Iterator[slice]:
    step = max(1, CHUNK_PIXELS.get(device.type, CHUNK_PIXELS_ELSEWHERE) // pixels)
    for begin in range(0, count, step):
        yield slice(begin, begin + step)
