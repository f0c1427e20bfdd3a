"""Procedural images: what a network is run on when there is no data.

Two families have most of what natural images have in common. Dead leaves (opaque shapes that
hide one another) give edges, flat regions and occlusion at every scale; pink noise gives the power
spectrum. In both, the colour channels mostly agree. They are joined as in photographs: leaves
seen from three distances, with texture on them, one picture sharper than another, under light of
varying strength and colour.

There is no Python loop over images; the same seed gives the same images on the same device; any
prefix of the set is a mixture of the distances. Images have about zero mean and unit deviation over
the set, as a normalised data set has, each with the brightness, contrast and tint of its light.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.inputs.images.leaves import dead_leaves
from lbyl.inputs.images.noise import Size, at_once, normal, pink_noise, squared_frequencies

DISTANCES = ((1 / 64, 1 / 3), (3 / 32, 1 / 2), (5 / 32, 0.9))  # radii, of the shorter side
LEAF_COLOUR, TEXTURE, TEXTURE_COLOUR = 0.2, 0.3, 0.1  # colour relative to the common grey
SHARPNESS = 0.4  # deviation of the spectrum's exponent from image to image; 0.3 … 0.5 do the same
BRIGHTNESS, CONTRAST, TINT = 0.5, 0.3, 0.15  # deviations of the light from image to image


COLOURS = 4  # channels that an image has at most, where they come last


def channels_come_last(shape: Sequence[int]) -> bool:
    """Whether a shape is `(H, W, C)`, as TensorFlow has it: known by its few channels."""
    return len(shape) == 3 and shape[2] <= COLOURS < min(shape[:2])


def channels_first(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an image as `(C, H, W)`, however it is given."""
    return (shape[2], *shape[:2]) if channels_come_last(shape) else tuple(shape)


def as_given(images: Tensor, last: bool) -> Tensor:
    """Images (n, c, h, w) with their channels last, where the network takes them so."""
    return images.permute(0, 2, 3, 1).contiguous() if last else images


def procedural_images(
    count: int, shape: Sequence[int], *, seed: int = 0, device: str | torch.device = "cpu"
) -> Tensor:
    """Return `count` images of `shape` as float32 `(count, *shape)`.

    `shape` is `(C, H, W)` (or `(H, W, C)` of up to four channels), `(C, L)`, `(C, D, H, W)` or
    `(L,)`. A flat vector whose length is that
    of a square picture of one or three channels (784, 3072) is taken for one, flattened; any other
    is a signal of one channel. For signals and volumes pink noise takes the place of leaves.
    """
    order = channels_first(shape)
    channels, size = _checked(count, order)
    generator = torch.Generator(device=torch.device(device)).manual_seed(seed)
    images = _scenes(count, channels, size, generator).reshape(count, *order)
    return as_given(images, channels_come_last(shape))


def _checked(count: int, shape: Sequence[int]) -> tuple[int, Size]:
    """Channels and spatial size of a shape."""
    if count < 1:
        raise LbylError(f"count must be at least 1, not {count}")
    if not 1 <= len(shape) <= 4 or any(side < 1 for side in shape):
        raise LbylError(f"shape must be (L,), (C, L), (C, H, W) or (C, D, H, W), not {shape}")
    sides = tuple(int(side) for side in shape)
    return _unflattened(sides[0]) if len(sides) == 1 else (sides[0], sides[1:])


def _unflattened(length: int) -> tuple[int, Size]:
    """The picture that a flat vector most likely is; below 8 pixels a side there is none to see."""
    for channels in (1, 3):
        side = math.isqrt(length // channels)
        if side >= 8 and channels * side * side == length:
            return channels, (side, side)
    return 1, (length,)


def _scenes(count: int, channels: int, size: Size, generator: torch.Generator) -> Tensor:
    """Dead leaves at three distances, textured by pink noise, under varying light."""
    texture = _standardised(pink_noise(count, channels, size, generator, TEXTURE_COLOUR))
    if len(size) != 2:
        return _light(texture, generator)
    images = torch.empty_like(texture)
    for first, ends in enumerate(DISTANCES):
        number = len(range(first, count, len(DISTANCES)))
        if number:
            painted = dead_leaves(number, channels, size, generator, ends, LEAF_COLOUR)
            images[first :: len(DISTANCES)] = _standardised(painted)
    images += texture.mul_(TEXTURE)
    images = _sharpened(images.div_(math.hypot(1, TEXTURE)), generator)
    return _light(images, generator)


def _sharpened(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images, in place, as sharp or as soft as chance has it, mean and deviation as before.

    The amplitude at frequency f is multiplied by fᵉ with an exponent e of the image's own: some
    photographs are full of detail and some out of focus, which one spectrum for all does not show.
    """
    count, size = len(images), images.shape[2:]
    exponent = SHARPNESS * normal((count, 1, 1, 1), generator)
    logs = squared_frequencies(size, images.device, per_image=True).clamp(min=1).log() / 2

    def change(some: Tensor, exponent: Tensor) -> Tensor:
        mean = some.mean((2, 3), keepdim=True)
        spectrum = torch.fft.rfft2(some - mean) * torch.exp(exponent * logs)
        made = torch.fft.irfft2(spectrum, s=size)
        before, after = (
            (x - x.mean((2, 3), keepdim=True)).flatten(1).norm(dim=1) for x in (some, made)
        )
        return made * (before / after.clamp(min=1e-30)).view(-1, 1, 1, 1) + mean

    chunk = at_once(images)
    for some, own in zip(images.split(chunk), exponent.split(chunk)):
        some.copy_(change(some, own))
    return images


def _standardised(images: Tensor) -> Tensor:
    """Zero mean and unit deviation per image, in place, all channels together: tints survive."""
    flat = images.flatten(1)
    if flat.shape[1] == 1:
        return images
    std, mean = torch.std_mean(flat, dim=1, correction=0, keepdim=True)
    return flat.sub_(mean).div_(std.clamp_min(1e-5)).view(images.shape)


def _light(images: Tensor, generator: torch.Generator) -> Tensor:
    """Contrast, brightness and tint, drawn for every image."""
    count, channels = images.shape[:2]
    ones = [1] * (images.dim() - 2)
    contrast = torch.exp(CONTRAST * normal((count, 1, *ones), generator))
    shift = BRIGHTNESS * normal((count, 1, *ones), generator)
    shift = shift + TINT * normal((count, channels, *ones), generator)
    # What the mean squares of the three leave to the image itself, for unit deviation in all.
    room = 1 - BRIGHTNESS**2 - TINT**2
    strength = math.sqrt(room / math.exp(2 * CONTRAST**2))
    return images.mul_(contrast * strength).add_(shift)
