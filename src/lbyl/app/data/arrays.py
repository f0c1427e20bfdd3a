"""Image sets stored as arrays: `.npz` files, MNIST's idx files and scikit-learn's digits.

They are read by numpy alone, so that none of them needs torchvision (whose idx reader, moreover,
reads no gzip and checks no sizes).
"""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbyl.app.data.imageset import Image, ImageSet, Source
from lbyl.app.data.pictures import LazyImages, decode, resized
from lbyl.errors import LbylError

_DIGITS_TRAINING = 1000  # the other 797 are held out
_IDX_PREFIX = {"test": "t10k", "train": "train"}
_IDX_LAYOUTS = ("", "raw", "FashionMNIST/raw", "MNIST/raw")  # the last three are torchvision's


def read_digits(split: str, size: int | None = None) -> ImageSet:
    """scikit-learn's digits (8×8, grey): the 1,000 for training, or the 797 held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LbylError("the digits need scikit-learn: pip install lbyl[demo]") from error
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    indices = order[:_DIGITS_TRAINING] if split == "train" else order[_DIGITS_TRAINING:]
    # Stored as 0..16; every set here is 0..255.
    pixels = np.rint(digits.images[indices] * (255 / 16)).astype(np.uint8)[..., None]
    name, classes = f"digits {split}", [str(digit) for digit in range(10)]
    return ImageSet(resized(pixels, size, name), digits.target[indices], classes, name)


def idx_folders(root: Path) -> list[Path]:
    """The folders at or under `root`, in the usual layouts, that hold idx image files."""
    folders = [root / layout for layout in _IDX_LAYOUTS]
    return [folder for folder in folders if any(folder.glob("*-images[-.]idx3-ubyte*"))]


def read_idx(path: Path, split: str, size: int | None = None) -> ImageSet:
    """MNIST's format: `path` is a file of images, or a folder; labels lie next to the images."""
    if path.is_dir():
        path = _idx_path(path, f"{_IDX_PREFIX[split]}-images", 3)
    labels = _idx_path(path.parent, path.name.split("-images")[0] + "-labels", 1)
    pixels = _idx_array(path, 3)[..., None]
    return ImageSet(resized(pixels, size, path.name), _idx_array(labels, 1), name=path.name)


def _idx_path(folder: Path, start: str, dimensions: int) -> Path:
    names = [f"{start}{dash}idx{dimensions}-ubyte{gz}" for dash in "-." for gz in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise LbylError(f"{folder} has no {names[0]}[.gz]")


def _idx_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Unsigned bytes after a header: magic number, then a big-endian length per dimension."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:4] != bytes([0, 0, 8, dimensions]):
                raise LbylError(f"{path} is not an idx file of bytes in {dimensions} dimension(s)")
            shape = tuple(np.frombuffer(header, ">u4", offset=4).tolist())
            _check_expansion(path, math.prod(shape))
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, MemoryError, zlib.error) as error:
        raise LbylError(f"{path} cannot be read: {error}") from error
    if len(data) != math.prod(shape):
        raise LbylError(f"{path} announces shape {shape} but does not hold that many bytes")
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape)  # a bytearray can be written to


def _check_expansion(path: Path, size: int) -> None:
    """Refuse a file announcing `size` bytes unpacked, where real images pack far less well."""
    if size > max(64 << 20, 100 * path.stat().st_size):
        raise LbylError(f"{path} announces {size:,} bytes, too many for a file of its size")


def read_npz(path: Path, size: int | None = None) -> ImageSet:
    """An image set in one `.npz` file; arrays of Python objects are refused.

    It holds `images`, uint8 (N, H, W, C) or (N, H, W); or `jpeg`, `webp` or `png`, encoded
    pictures end to end, number i from `offsets[i]` to `offsets[i + 1]`. `labels` and `classes`
    (names) are optional.
    """
    arrays = _npz_arrays(path)
    labels = arrays.get("labels")
    if labels is not None and not np.issubdtype(labels.dtype, np.integer):
        raise LbylError(f"{path}: labels must be integers, not {labels.dtype}")
    names = arrays.get("classes")
    classes = None if names is None else [str(name) for name in names.ravel()]
    return ImageSet(_npz_source(path, arrays, size), labels, classes, name=path.name)


def _npz_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_expansion(path, sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except LbylError:
        raise
    except Exception as error:  # headers are parsed as Python, and can fail in any way at all
        raise LbylError(f"{path} is not a readable .npz file: {error}") from error


def _npz_source(path: Path, arrays: dict[str, NDArray[Any]], size: int | None) -> Source:
    if "images" in arrays:
        return resized(_check_pixels(path, arrays["images"]), size, path.name)
    kind = next((kind for kind in ("jpeg", "webp", "png") if kind in arrays), None)
    if kind is None or "offsets" not in arrays:
        keys = ", ".join(sorted(arrays)) or "nothing"
        raise LbylError(f"{path} needs 'images', or 'jpeg'/'webp'/'png' and 'offsets'; has: {keys}")
    data, offsets = arrays[kind], _check_offsets(path, arrays[kind], arrays["offsets"])

    def read(index: int) -> Image:
        encoded = data[offsets[index] : offsets[index + 1]].tobytes()
        return decode(encoded, size, f"{path.name}, image {index}")

    return LazyImages(len(offsets) - 1, read)


def _check_pixels(path: Path, images: NDArray[Any]) -> Image:
    pixels = images[..., None] if images.ndim == 3 else images
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] not in (1, 3):
        given = f"{images.dtype} {images.shape}"
        raise LbylError(f"{path}: images must be uint8 (N, H, W, 3) or (N, H, W), not {given}")
    return pixels


def _check_offsets(path: Path, data: NDArray[Any], offsets: NDArray[Any]) -> NDArray[np.int64]:
    flat = data.ndim == 1 and offsets.ndim == 1 and offsets.size > 0
    if not flat or data.dtype != np.uint8 or offsets.dtype.kind not in "iu":
        raise LbylError(f"{path}: pictures must be a flat uint8 array, offsets flat integers")
    # Signed before the difference: in an unsigned type a step back would look like a step ahead.
    signed = offsets.astype(np.int64)
    if signed[0] < 0 or signed[-1] > data.size or (np.diff(signed) < 0).any():
        raise LbylError(f"{path}: 'offsets' must rise from 0 to at most {data.size}")
    return signed
