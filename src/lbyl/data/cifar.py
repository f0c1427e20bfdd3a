"""CIFAR-10 and CIFAR-100 in the layout torchvision downloads.

Those files are pickles, and an ordinary unpickler runs whatever a pickle names. The official
files need very little: built-in containers, strings, integers and uint8 arrays. So nothing that
the file names is looked up at all. The few names which numpy writes for an array are answered by
the inert stand-ins below, which check what they are given and copy plain bytes into an array;
any other name is refused before anything is called. The worst a hostile file can do is fail.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbyl.data.imageset import ImageSet
from lbyl.data.pictures import sized
from lbyl.exceptions import LbylError

_FOLDERS = ("cifar-10-batches-py", "cifar-100-python")
_FILES = {
    ("cifar-10-batches-py", "test"): ("test_batch",),
    ("cifar-10-batches-py", "train"): tuple(f"data_batch_{i}" for i in range(1, 6)),
    ("cifar-100-python", "test"): ("test",),
    ("cifar-100-python", "train"): ("train",),
}
_META = {
    "cifar-10-batches-py": ("batches.meta", "label_names"),
    "cifar-100-python": ("meta", "fine_label_names"),
}
_LABELS = {"cifar-10-batches-py": "labels", "cifar-100-python": "fine_labels"}


def cifar_folders(root: Path) -> list[Path]:
    """``root`` itself if it has one of the official names, else those found in it."""
    if root.name in _FOLDERS:
        return [root]
    return [root / name for name in _FOLDERS if (root / name).is_dir()]


def read_cifar(folder: Path, split: str, size: int | None = None) -> ImageSet:
    """One split of the official Python version of CIFAR."""
    kind = folder.name
    batches = [_read(folder / name) for name in _FILES[kind, split]]
    pixels = np.concatenate([_images(folder, batch) for batch in batches])
    labels = [label for batch in batches for label in _labels(folder, batch, _LABELS[kind])]
    return ImageSet(sized(pixels, size), labels, _class_names(folder), name=f"{kind} {split}")


def _images(folder: Path, batch: dict[str, Any]) -> NDArray[np.uint8]:
    data = batch.get("data")
    if not isinstance(data, _Array) or data.pixels is None:
        raise LbylError(f"{folder}: a batch has no array named 'data'")
    if data.pixels.ndim != 2 or data.pixels.shape[1] != 3 * 32 * 32:
        raise LbylError(f"{folder}: 'data' must be (N, 3072), not {data.pixels.shape}")
    # Stored channel by channel; everything here goes by pixel.
    images: NDArray[np.uint8] = data.pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images


def _labels(folder: Path, batch: dict[str, Any], key: str) -> list[int]:
    labels = batch.get(key)
    if not isinstance(labels, list) or not all(isinstance(n, int) for n in labels):
        raise LbylError(f"{folder}: a batch has no list of integers named {key!r}")
    return labels


def _class_names(folder: Path) -> list[str] | None:
    file, key = _META[folder.name]
    if not (folder / file).is_file():
        return None
    found = _read(folder / file).get(key)
    if not isinstance(found, list):
        raise LbylError(f"{folder / file} has no list named {key!r}")
    return [_text(name) for name in found]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise LbylError(f"no file at {path}")
    loaded = restricted_load(path.read_bytes(), str(path))
    if not isinstance(loaded, dict):
        raise LbylError(f"{path} does not hold a dictionary")
    return {_text(key): value for key, value in loaded.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def restricted_load(data: bytes, name: str) -> Any:
    """Unpickle built-in containers and uint8 arrays; refuse everything else."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except LbylError as error:
        raise LbylError(f"{name}: {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way at all
        raise LbylError(f"{name} is not a readable CIFAR file: {error}") from error


class _Dtype:
    """Stands for numpy's dtype: remembers its code, ignores the rest."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: meaningless for single bytes."""


class _Array:
    """Stands for an array of bytes; empty until its state arrives."""

    def __init__(self) -> None:
        self.pixels: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, by_column, raw = state
        self.fill(raw, dtype, shape, "F" if by_column else "C")

    def fill(self, raw: Any, dtype: Any, shape: Any, order: Any) -> None:
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1", "uint8"):
            raise LbylError("only arrays of unsigned bytes are accepted")
        lengths = tuple(int(n) for n in shape)
        plain = isinstance(raw, bytes | bytearray) and all(n >= 0 for n in lengths)
        if not plain or len(raw) != math.prod(lengths):
            raise LbylError(f"an array of shape {lengths} does not have that many bytes")
        pixels = np.frombuffer(bytes(raw), dtype=np.uint8)
        self.pixels = pixels.reshape(lengths, order="F" if order == "F" else "C")


class _ArrayName:
    """What the name ``numpy.ndarray`` gives: a mark to pass around, of no use otherwise."""


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    array = _Array()
    array.fill(raw, dtype, shape, order)
    return array


def _encode(text: str, encoding: str = "latin1") -> bytes:
    # How Python 3 writes bytes in the old protocols: always by way of this one encoding.
    if encoding not in ("latin1", "latin-1"):
        raise LbylError(f"encoding {encoding!r} is not accepted")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ArrayName,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise LbylError(f"the file asks for {module}.{name}, which no image set needs; refused")
        return _STAND_INS[module, name]
