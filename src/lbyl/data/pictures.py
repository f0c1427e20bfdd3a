"""Turning encoded pictures into uint8 arrays, resized in the usual way for ImageNet."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lbyl.data.imageset import Image, Source
from lbyl.exceptions import LbylError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


class FilePictures:
    """Picture files, decoded when asked for."""

    def __init__(self, paths: list[Path], size: int | None) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int, /) -> Image:
        path = self.paths[index]
        return decode(path.read_bytes(), self.size, str(path))


class BlobPictures:
    """Pictures laid end to end in one array of bytes: number i lies between two offsets."""

    def __init__(
        self, blob: NDArray[np.uint8], offsets: NDArray[Any], size: int | None, name: str
    ) -> None:
        self.blob, self.offsets, self.size, self.name = blob, offsets, size, name

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int, /) -> Image:
        data = self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return decode(data, self.size, f"{self.name}, image {index}")


class ResizedArray:
    """An array of images, each brought to a given size when asked for."""

    def __init__(self, images: Image, size: int) -> None:
        self.images, self.size = images, size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> Image:
        pillow = _pillow()
        image = self.images[index]
        grey = image.shape[-1] == 1
        picture = pillow.fromarray(image[..., 0] if grey else image)
        return _pixels(fit(picture, self.size))


def sized(images: Image, size: int | None) -> Source:
    """The images (N, H, W, C) at ``size``, or untouched where there is nothing to do."""
    if size is None or images.shape[1:3] == (size, size):
        return images
    return ResizedArray(images, size)


def decode(data: bytes, size: int | None, name: str) -> Image:
    """An encoded picture as RGB."""
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            picture = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise LbylError(f"{name} is not a readable picture: {error}") from error
    return _pixels(picture if size is None else fit(picture, size))


def fit(picture: Picture, size: int) -> Picture:
    """Shorter side to 256/224 of ``size``, then the middle ``size`` × ``size``.

    A picture that has the wanted size already was prepared before, and stays as it is.
    """
    if picture.size == (size, size):
        return picture
    short = int(256 * size / 224)
    width, height = picture.size
    if width <= height:
        wide, high = short, int(short * height / width)
    else:
        wide, high = int(short * width / height), short
    picture = picture.resize((wide, high), _pillow().Resampling.BILINEAR)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return picture.crop((left, top, left + size, top + size))


def _pixels(picture: Picture) -> Image:
    pixels = np.array(picture, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _pillow() -> Any:
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise LbylError("reading pictures needs Pillow: pip install lbyl[vision]") from error
    return pillow
