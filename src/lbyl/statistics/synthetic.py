"""Procedural images: what the statistics are read from when there is no data.

Two families carry most of what natural images share. Dead leaves (opaque shapes that hide one
another, radius density ∝ r⁻³) give edges, flat regions and occlusion at every scale; pink noise
(amplitude 1/f^1.5) gives the power spectrum. In both, the colour channels mostly agree. The default
kind, `scenes`, joins them as photographs do: leaves seen from three distances, with texture on
them, under light of varying strength and colour.

What the design must satisfy: no Python loop over images, the same images for the same seed on the
same device, any prefix of the set a mixture of the kinds, and so little time that nobody caches.

Every image of the plain kinds is brought to zero mean and unit deviation *per image and per
channel*, so an image does not depend on which others were asked for. Where a single image has no
spread of its own (one pixel), the set's mean and deviation serve instead. Scenes keep the
brightness, contrast and tint that their light gave them: about zero mean and unit deviation over
the set, as a normalised data set has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lbyl.exceptions import LbylError

Size = tuple[int, ...]
Painter = Callable[[int, int, Size, torch.Generator], Tensor]

#: Name → painter ``(count, channels, size, generator) -> (count, channels, *size)``, unnormalised.
KINDS: dict[str, Painter] = {}
LIT = {"scenes"}  # kinds whose light is part of the picture: not standardised afterwards

PINK_EXPONENT = 1.5
COLOUR_SPREAD = 0.5  # what a channel has of its own, relative to the grey that all share
SMALLEST_RADIUS, LARGEST_RADIUS = 1 / 64, 1 / 3  # of the shorter side
FEWEST_PIXELS = 1.5  # of radius: below that a leaf is a speck of noise
DISTANCES = ((1 / 64, 1 / 3), (3 / 32, 1 / 2), (5 / 32, 0.9))  # radii of leaves in scenes
SCENE_SPREAD, TEXTURE, TEXTURE_SPREAD = 0.2, 0.3, 0.1
BRIGHTNESS, CONTRAST, TINT = 0.5, 0.3, 0.15  # deviations of the light from image to image
LAYERS_OF_LEAVES = 4.0  # how often a pixel is covered on average: e⁻⁴ = 2 % see the background
CHUNK_PIXELS = {"cpu": 1 << 20}  # the CPU's cache decides; an accelerator takes far more at once
CHUNK_PIXELS_ELSEWHERE = 1 << 25


def procedural_images(
    count: int,
    shape: Sequence[int],
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    kinds: Sequence[str] = ("scenes",),
) -> Tensor:
    """Return ``count`` images of ``shape`` as float32 ``(count, *shape)``.

    ``shape`` is ``(C, H, W)``, ``(C, L)``, ``(C, D, H, W)`` or ``(L,)``. A flat vector whose length
    is that of a square picture of one or three channels (784, 3072) is taken for one, flattened;
    any other is a signal of one channel. Leaves are a thing of the plane: for signals and volumes
    pink noise takes their place. Image i is of kind ``kinds[i % len(kinds)]``, so the first n are
    a mixture too.
    """
    channels, size = _checked(count, shape, kinds)
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    images = torch.empty((count, channels, *size), device=device)
    for place, name in enumerate(kinds):
        share = len(range(place, count, len(kinds)))
        if share:
            painted = KINDS[name](share, channels, size, generator)
            images[place :: len(kinds)] = painted if name in LIT else standardise(painted)
    return images.reshape(count, *shape)


def standardise(images: Tensor) -> Tensor:
    """Zero mean and unit deviation per image and channel; an image of one colour becomes zero."""
    flat = images.flatten(2)
    dims = (2,) if flat.shape[2] > 1 else (0,)
    deviation, mean = torch.std_mean(flat, dim=dims, correction=0, keepdim=True)
    # A constant image leaves rounding noise of about 1e-7 behind, which must not be blown up.
    scale = torch.where(deviation > 1e-5, 1 / deviation.clamp_min(1e-5), 0.0)
    return ((flat - mean) * scale).view(images.shape)


def _checked(count: int, shape: Sequence[int], kinds: Sequence[str]) -> tuple[int, Size]:
    if count < 1:
        raise LbylError(f"count must be at least 1, not {count}")
    if not 1 <= len(shape) <= 4 or any(side < 1 for side in shape):
        raise LbylError(f"shape must be (L,), (C, L), (C, H, W) or (C, D, H, W), not {shape}")
    unknown = [name for name in kinds if name not in KINDS]
    if unknown or not kinds:
        raise LbylError(f"unknown kinds of image {unknown}; there are {sorted(KINDS)}")
    sides = tuple(int(side) for side in shape)
    return _unflattened(sides[0]) if len(sides) == 1 else (sides[0], sides[1:])


def _unflattened(length: int) -> tuple[int, Size]:
    """The picture that a flat vector most likely is; below 8 pixels a side there is none to see."""
    for channels in (1, 3):
        side = math.isqrt(length // channels)
        if side >= 8 and channels * side * side == length:
            return channels, (side, side)
    return 1, (length,)


def register_kind(name: str) -> Callable[[Painter], Painter]:
    """Make a painter available to ``procedural_images(kinds=(name, ...))``."""

    def register(painter: Painter) -> Painter:
        KINDS[name] = painter
        return painter

    return register


# ------------------------------------------------------------------------------------- noise


@register_kind("noise")
def white_noise(count: int, channels: int, size: Size, generator: torch.Generator) -> Tensor:
    """Independent Gaussian pixels: the control for every experiment with structured images."""
    return _normal((count, channels, *size), generator)


@register_kind("pink")
def pink_noise(count: int, channels: int, size: Size, generator: torch.Generator) -> Tensor:
    """Noise of amplitude 1/f^1.5 in any number of dimensions, correlated across channels."""
    return _pink(count, channels, size, generator, COLOUR_SPREAD)


def _pink(
    count: int, channels: int, size: Size, generator: torch.Generator, spread: float
) -> Tensor:
    white = _normal((count, channels, *size), generator).mul_(spread)
    white += _normal((count, 1, *size), generator)
    dims = tuple(range(2, 2 + len(size)))
    # Shaping real noise costs a second transform, but needs no care for Hermitian symmetry.
    spectrum = torch.fft.rfftn(white, dim=dims)
    spectrum *= _amplitude(size, white.device)
    noise: Tensor = torch.fft.irfftn(spectrum, s=size, dim=dims)
    return noise


def _amplitude(size: Size, device: torch.device) -> Tensor:
    """1/f^1.5 on the half spectrum, f in cycles per pixel; none at f = 0, the mean."""
    if math.prod(size) == 1:  # one pixel has nothing but its mean
        return torch.ones(size, device=device)
    axes = [torch.fft.fftfreq(side, device=device) for side in size[:-1]]
    axes.append(torch.fft.rfftfreq(size[-1], device=device))
    squares = torch.zeros((), device=device)
    for axis in axes:
        squares = squares.unsqueeze(-1) + axis.square()
    # Dividing by the lowest frequency keeps the numbers near one, whatever the size.
    lowest = 1 / max(size)
    amplitude = (squares.sqrt() / lowest).clamp_min(1e-6).pow(-PINK_EXPONENT)
    return torch.where(squares > 0, amplitude, 0.0)


# ------------------------------------------------------------------------------- dead leaves


@register_kind("leaves")
def dead_leaves(count: int, channels: int, size: Size, generator: torch.Generator) -> Tensor:
    """Opaque discs and rectangles that hide one another, each of one colour.

    Leaves are a thing of the plane: for signals and volumes pink noise takes their place.
    """
    if len(size) != 2:
        return _pink(count, channels, size, generator, COLOUR_SPREAD)
    ends = (SMALLEST_RADIUS, LARGEST_RADIUS)
    return _leaves(count, channels, size, generator, ends, COLOUR_SPREAD)


def _leaves(
    count: int,
    channels: int,
    size: Size,
    generator: torch.Generator,
    ends: tuple[float, float],
    spread: float,
) -> Tensor:
    height, width = size
    leaves = _leaf_count(height, width, ends)
    outlines = _outlines(count, leaves, height, width, ends, generator)
    grey = _uniform((count, 1, leaves + 1), generator)
    own = _uniform((count, channels, leaves + 1), generator)
    colours = grey + spread * own
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
    reach = torch.where(disc, radius, along * sine.abs() + across * cosine.abs())
    zero = torch.zeros_like(radius)
    return torch.stack(
        [
            y,
            x,
            reach,
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
    y, _, reach = outlines[:3].flatten(1)
    first = (y - reach - 0.5).ceil().clamp(0, height).long()
    rows = ((y + reach - 0.5).floor().clamp(-1, height - 1).long() + 1 - first).clamp_min(0)
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


# ------------------------------------------------------------------------------------ scenes


@register_kind("scenes")
def scenes(count: int, channels: int, size: Size, generator: torch.Generator) -> Tensor:
    """Dead leaves at three distances, textured by pink noise, under varying light."""
    texture = _whole(_pink(count, channels, size, generator, TEXTURE_SPREAD))
    if len(size) != 2:
        return _light(texture, generator)
    images = torch.empty_like(texture)
    for place, ends in enumerate(DISTANCES):
        share = len(range(place, count, len(DISTANCES)))
        if share:
            painted = _leaves(share, channels, size, generator, ends, SCENE_SPREAD)
            images[place :: len(DISTANCES)] = _whole(painted)
    images += texture.mul_(TEXTURE)
    return _light(images.div_(math.hypot(1, TEXTURE)), generator)


def _whole(images: Tensor) -> Tensor:
    """Zero mean and unit deviation per image, all channels together: tints survive."""
    flat = images.flatten(1)
    if flat.shape[1] == 1:
        return images
    deviation, mean = torch.std_mean(flat, dim=1, correction=0, keepdim=True)
    return ((flat - mean) / deviation.clamp_min(1e-5)).view(images.shape)


def _light(images: Tensor, generator: torch.Generator) -> Tensor:
    """Contrast, brightness and tint, drawn for every image."""
    count, channels = images.shape[:2]
    ones = [1] * (images.dim() - 2)
    contrast = torch.exp(CONTRAST * _normal((count, 1, *ones), generator))
    shift = BRIGHTNESS * _normal((count, 1, *ones), generator)
    shift = shift + TINT * _normal((count, channels, *ones), generator)
    # What the mean squares of the three leave to the image itself, for unit deviation in all.
    room = 1 - BRIGHTNESS**2 - TINT**2
    strength = math.sqrt(room / math.exp(2 * CONTRAST**2))
    return images.mul_(contrast * strength).add_(shift)


# ---------------------------------------------------------------------- kinds for experiments


@register_kind("gradients")
def gradients(count: int, channels: int, size: Size, generator: torch.Generator) -> Tensor:
    """Smooth shading: a few waves in random directions, each longer than the image."""
    return _waves(count, channels, size, generator, waves=4, cycles=(0.1, 0.8), window=None)


@register_kind("textures")
def textures(count: int, channels: int, size: Size, generator: torch.Generator) -> Tensor:
    """Oriented band-pass patches (Gabor functions) of random place, pitch and direction."""
    most = max(2.0, min(size) / 4)
    return _waves(
        count, channels, size, generator, waves=24, cycles=(1.0, most), window=(0.08, 0.3)
    )


def _waves(
    count: int,
    channels: int,
    size: Size,
    generator: torch.Generator,
    *,
    waves: int,
    cycles: tuple[float, float],
    window: tuple[float, float] | None,
) -> Tensor:
    """Sum of plane waves (pitch log-uniform, in cycles per image), each under a Gaussian window."""
    device, dims = generator.device, len(size)
    images = torch.zeros((count, channels, *size), device=device)
    axes = [(torch.arange(side, device=device) + 0.5) / side for side in size]

    def column(values: Tensor) -> Tensor:
        return values.view(count, *([1] * dims))

    for _ in range(waves):
        u = torch.rand((count, 3 + dims), device=device, generator=generator)
        direction = torch.nn.functional.normalize(_normal((count, dims), generator), dim=1)
        pitch = math.tau * cycles[0] * (cycles[1] / cycles[0]) ** u[:, 0]
        phase, blur = column(u[:, 1] * math.tau), torch.zeros((), device=device)
        for d, axis in enumerate(axes):
            along = axis.view([1] * (d + 1) + [-1] + [1] * (dims - d - 1))
            phase = phase + column(pitch * direction[:, d]) * along
            if window is not None:
                wide = column(window[0] + (window[1] - window[0]) * u[:, 2])
                blur = blur + ((along - column(u[:, 3 + d])) / wide).square()
        wave = torch.cos(phase) * torch.exp(-blur / 2)
        colour = _normal((count, 1), generator) + COLOUR_SPREAD * _normal(
            (count, channels), generator
        )
        images.addcmul_(wave.unsqueeze(1), colour.view(count, channels, *([1] * dims)))
    return images


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, device=generator.device, generator=generator)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=generator.device, generator=generator) * 2 - 1
