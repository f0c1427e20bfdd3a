"""Image sets in one ``.npz`` file: raw pixels, or encoded pictures laid end to end.

Either ``images``, uint8 (N, H, W, C) or (N, H, W); or ``jpeg``, ``webp`` or ``png`` with
``offsets``. ``labels`` and ``classes`` (names) are optional.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbyl.data.imageset import Image, ImageSet, Source
from lbyl.data.pictures import BlobPictures, sized
from lbyl.exceptions import LbylError

_ENCODED = ("jpeg", "webp", "png")


def read_npz(path: Path, size: int | None = None) -> ImageSet:
    """Read an ``.npz`` image set; arrays of Python objects are refused."""
    arrays = _arrays(path)
    labels = arrays.get("labels")
    if labels is not None and not np.issubdtype(labels.dtype, np.integer):
        raise LbylError(f"{path}: labels must be integers, not {labels.dtype}")
    names = arrays.get("classes")
    classes = None if names is None else [str(name) for name in names]
    return ImageSet(_source(path, arrays, size), labels, classes, name=path.name)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(path):  # an .npz is a zip; np.load alone would try other formats too
            pass
        with np.load(path, allow_pickle=False) as loaded:
            return {key: loaded[key] for key in loaded.files}
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError) as error:
        raise LbylError(f"{path} is not a readable .npz file: {error}") from error


def _source(path: Path, arrays: dict[str, NDArray[Any]], size: int | None) -> Source:
    if "images" in arrays:
        return sized(_pixels(path, arrays["images"]), size)
    for kind in _ENCODED:
        if kind in arrays:
            if "offsets" not in arrays:
                raise LbylError(f"{path} has {kind!r} but no 'offsets' to divide it into pictures")
            _check_blob(path, kind, arrays[kind], arrays["offsets"])
            return BlobPictures(arrays[kind], arrays["offsets"], size, path.name)
    found = ", ".join(sorted(arrays)) or "nothing"
    raise LbylError(f"{path} needs 'images', or 'jpeg'/'webp'/'png' with 'offsets'; has: {found}")


def _pixels(path: Path, images: NDArray[Any]) -> Image:
    pixels = images[..., None] if images.ndim == 3 else images
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] not in (1, 3):
        raise LbylError(
            f"{path}: 'images' must be uint8 (N, H, W, 3) or (N, H, W), "
            f"not {images.dtype} {images.shape}"
        )
    return pixels


def _check_blob(path: Path, kind: str, blob: NDArray[Any], offsets: NDArray[Any]) -> None:
    if blob.dtype != np.uint8 or blob.ndim != 1:
        raise LbylError(f"{path}: {kind!r} must be a flat uint8 array")
    flat = offsets.ndim == 1 and offsets.size > 0 and np.issubdtype(offsets.dtype, np.integer)
    if not flat:
        raise LbylError(f"{path}: 'offsets' must be a flat array of integers")
    # Signed before the difference: in an unsigned type a step back would look like a step ahead.
    wide = offsets.astype(np.int64)
    if wide[0] < 0 or wide[-1] > blob.size or (np.diff(wide) < 0).any():
        raise LbylError(f"{path}: 'offsets' must rise from 0 to at most {blob.size}")
