"""Encoded pictures as uint8 arrays, resized as usual for ImageNet; folders of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lbyl.app.data.imageset import Image, ImageSet, Source
from lbyl.errors import LbylError

_DEFAULT_SIZE = 224
_MAX_PIXELS = 64_000_000
_SPLITS = {"test": ("test", "val"), "train": ("train",)}


def require(module: str) -> Any:
    """A module of the optional extra `vision`."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise LbylError(f"these images need {package}: pip install lbyl[vision]") from error


@dataclass(frozen=True)
class LazyImages:
    """`count` images, of which number i is read by `read(i)` when asked for."""

    count: int
    read: Callable[[int], Image]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Image:
        return self.read(index)


def read_folder(root: Path, split: str, size: int | None = None) -> ImageSet:
    """Pictures of `root`, or of its subfolder for the split: a folder a class, or unlabelled."""
    module = require("torchvision.datasets.folder")
    suffixes = (*module.IMG_EXTENSIONS, ".gif")

    def is_picture(path: str) -> bool:
        return path.lower().endswith(suffixes) and not Path(path).name.startswith(".")

    folder = next((root / s for s in _SPLITS[split] if (root / s).is_dir()), root)
    entries = sorted(folder.iterdir())
    classes = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    samples = classes and module.make_dataset(  # which refuses to look for no class at all
        folder, {c: i for i, c in enumerate(classes)}, is_valid_file=is_picture, allow_empty=True
    )
    if samples:
        paths, labels = zip(*samples)
        return ImageSet(_files(paths, size), labels, classes, str(folder))
    flat = [str(entry) for entry in entries if entry.is_file() and is_picture(str(entry))]
    if not flat:
        raise LbylError(
            f"{folder} holds nothing readable: expected pictures ({', '.join(suffixes)}), "
            "class subfolders of them, idx files, or torchvision's CIFAR folders"
        )
    return ImageSet(_files(flat, size), None, name=str(folder))


def _files(paths: Any, size: int | None) -> Source:
    size = size or _DEFAULT_SIZE
    return LazyImages(len(paths), lambda i: decode(Path(paths[i]).read_bytes(), size, paths[i]))


def resized(images: Image, size: int | None, name: str) -> Source:
    """The images (N, H, W, C) at `size`, or untouched where there is nothing to do."""
    if 0 in images.shape[1:]:
        raise LbylError(f"{name}: images of shape {images.shape[1:]} have no pixels")
    if size is None or images.shape[1:3] == (size, size):
        return images
    pillow, side = require("PIL.Image"), size

    def read(index: int) -> Image:
        image = images[index]
        picture = pillow.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        return _resize(picture, side, f"{name}, image {index}")

    return LazyImages(len(images), read)


def decode(data: bytes, size: int | None, name: str) -> Image:
    """An encoded picture as RGB, at `size` where one is given."""
    pillow = require("PIL.Image")
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            if opened.width * opened.height > _MAX_PIXELS:  # told before they are unpacked
                raise LbylError(
                    f"{name}: {opened.width} × {opened.height} are more than {_MAX_PIXELS:,} pixels"
                )
            picture = opened.convert("RGB")
    except LbylError:
        raise
    except Exception as error:  # a damaged picture can fail in any way at all
        raise LbylError(f"{name} is not a readable picture: {error}") from error
    return np.array(picture) if size is None else _resize(picture, size, name)


def _resize(picture: Any, size: int, name: str) -> Image:
    """Shorter side to 256/224 of `size`, then the `size` × `size` at the centre.

    A picture that has the wanted size already was prepared before, and stays as it is.
    """
    if picture.size != (size, size):
        short = int(256 * size / 224)
        # A line one pixel wide would grow to gigabytes: its length is scaled as its width is.
        if short * short * max(picture.size) / min(picture.size) > _MAX_PIXELS:
            raise LbylError(
                f"{name}: {picture.width} × {picture.height} pixels, with the shorter side resized "
                f"to {short}, would be more than {_MAX_PIXELS:,} pixels"
            )
        functional = require("torchvision.transforms.v2.functional")
        picture = functional.center_crop(functional.resize(picture, [short]), [size, size])
    pixels = np.array(picture, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels
