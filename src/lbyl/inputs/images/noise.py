"""Pink noise: the power spectrum of natural images, in any number of dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Size = tuple[int, ...]
PINK_EXPONENT = 1.5
PIXELS = 1 << 20  # that are transformed at a time: it takes several times their memory
PIXELS_ON_DEVICE = 1 << 22


def pink_noise(
    count: int, channels: int, size: Size, generator: torch.Generator, own_colour: float
) -> Tensor:
    """Noise of amplitude 1/f^1.5; `own_colour` is what a channel has besides the common grey."""
    white = normal((count, channels, *size), generator).mul_(own_colour)
    white += normal((count, 1, *size), generator)
    dims = tuple(range(2, 2 + len(size)))
    amplitude = _amplitude(size, white.device)
    for some in white.split(at_once(white)):
        # Shaping real noise costs a second transform, but needs no care for Hermitian symmetry.
        spectrum = torch.fft.rfftn(some, dim=dims)
        spectrum *= amplitude
        some.copy_(torch.fft.irfftn(spectrum, s=size, dim=dims))
    return white


def _amplitude(size: Size, device: torch.device) -> Tensor:
    """1/f^1.5 on the half spectrum, f in cycles per pixel; none at f = 0, the mean."""
    if math.prod(size) == 1:  # one pixel has nothing but its mean
        return torch.ones(size, device=device)
    squares = squared_frequencies(size, device)
    # Dividing by the lowest frequency keeps the numbers near one, whatever the size.
    lowest = 1 / max(size)
    amplitude = (squares.sqrt() / lowest).clamp_min(1e-6).pow(-PINK_EXPONENT)
    return torch.where(squares > 0, amplitude, 0.0)


def squared_frequencies(
    size: Sequence[int],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    per_image: bool = False,
) -> Tensor:
    """f² on the half spectrum of real images, f in cycles per pixel, or per image."""
    axes = [torch.fft.fftfreq(side, dtype=dtype, device=device) for side in size[:-1]]
    axes.append(torch.fft.rfftfreq(size[-1], dtype=dtype, device=device))
    squares = torch.zeros((), dtype=dtype, device=device)
    for axis, side in zip(axes, size):
        squares = squares.unsqueeze(-1) + (axis * side if per_image else axis).square()
    return squares


def at_once(images: Tensor) -> int:
    """How many of images (n, channels, …) to transform at a time."""
    pixels = PIXELS if images.device.type == "cpu" else PIXELS_ON_DEVICE
    return max(1, pixels // max(1, math.prod(images.shape[2:])))


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, device=generator.device, generator=generator)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=generator.device, generator=generator) * 2 - 1
