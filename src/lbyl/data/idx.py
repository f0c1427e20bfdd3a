"""MNIST's own file format, used by FashionMNIST as well; compressed or not.

A header of big-endian integers (magic number, then one length per dimension), then raw bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lbyl.data.imageset import ImageSet
from lbyl.data.pictures import sized
from lbyl.exceptions import LbylError

_PREFIX = {"test": "t10k", "train": "train"}
_LAYOUTS = ("", "raw", "FashionMNIST/raw", "MNIST/raw")  # the last three are torchvision's


def idx_folders(root: Path) -> list[Path]:
    """The folders at or under ``root``, in the usual layouts, that hold idx image files."""
    folders = [root / layout for layout in _LAYOUTS]
    return [f for f in folders if any(_file(f, p, "images", 3) for p in _PREFIX.values())]


def read_idx(folder: Path, split: str, size: int | None = None) -> ImageSet:
    """Images and labels of one split from a folder of idx files."""
    images = _file(folder, _PREFIX[split], "images", 3)
    if images is None:
        raise LbylError(f"{folder} has no {_PREFIX[split]}-images-idx3-ubyte[.gz] ({split} split)")
    return read_idx_file(images, size)


def read_idx_file(images: Path, size: int | None = None) -> ImageSet:
    """An idx file of images, with the labels that lie next to it."""
    prefix = images.name.split("-images")[0]
    labels = _file(images.parent, prefix, "labels", 1)
    if labels is None:
        raise LbylError(f"{images.parent} has no {prefix}-labels-idx1-ubyte[.gz]")
    pixels = read_array(images, dimensions=3)[..., None]
    return ImageSet(sized(pixels, size), read_array(labels, dimensions=1), name=images.name)


def read_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in an idx file."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise LbylError(f"{path} cannot be read: {error}") from error
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, 8, dimensions]):
        raise LbylError(f"{path} is not an idx file of bytes with {dimensions} dimension(s)")
    shape = tuple(int(n) for n in np.frombuffer(data[4:header], dtype=">u4"))
    # Python's integers, because the lengths of a damaged header can overflow fixed-size ones.
    if len(data) - header != math.prod(shape):
        raise LbylError(f"{path} announces shape {shape} but has {len(data) - header} bytes")
    array: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)
    return np.array(array)  # a copy: what frombuffer gives cannot be written to


def _file(folder: Path, prefix: str, what: str, dimensions: int) -> Path | None:
    for dash in "-.":
        for suffix in ("", ".gz"):
            path = folder / f"{prefix}-{what}{dash}idx{dimensions}-ubyte{suffix}"
            if path.is_file():
                return path
    return None
