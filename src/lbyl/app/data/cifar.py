"""CIFAR-10 and CIFAR-100 as torchvision downloads them, without running their pickles.

Unpickling calls whatever the file names, so torchvision's own classes are used for the file names
only. Here no name in the file is looked up: the few that numpy writes for an array become `_Call`
objects that store their arguments and are interpreted afterwards; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbyl.app.data.imageset import ImageSet
from lbyl.app.data.pictures import require, resized
from lbyl.errors import LbylError

_DATASETS = {"cifar-10-batches-py": "CIFAR10", "cifar-100-python": "CIFAR100"}
_ALLOWED = re.compile(
    r"numpy\.(ndarray|dtype)|numpy\._?core\.(multiarray\._reconstruct|numeric\._frombuffer)"
    r"|_codecs\.encode"
)


def cifar_folders(root: Path) -> list[Path]:
    """`root` itself if it has one of the official names, else the subfolders that have one."""
    if root.name in _DATASETS:
        return [root]
    return [root / name for name in _DATASETS if (root / name).is_dir()]


def read_cifar(folder: Path, split: str, size: int | None = None) -> ImageSet:
    """The "train" or "test" split in a folder of the official Python version."""
    dataset = getattr(require("torchvision.datasets"), _DATASETS[folder.name])
    files = dataset.train_list if split == "train" else dataset.test_list
    pixels, labels = zip(*(_read_batch(folder / file) for file, _md5 in files))
    images, name = np.concatenate(pixels), f"{folder.name} {split}"
    classes = _class_names(folder / dataset.meta["filename"], dataset.meta["key"])
    return ImageSet(resized(images, size, name), np.concatenate(labels), classes, name)


def _class_names(path: Path, key: str) -> list[str] | None:
    if not path.is_file():
        return None
    names = _read(path).get(key)
    if not isinstance(names, list):
        raise LbylError(f"{path} has no list named {key!r}")
    return [_text(name) for name in names]


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 32, 32, 3) and labels (N,) of one file."""
    batch = _read(path)
    data, labels = batch.get("data"), batch.get("labels", batch.get("fine_labels"))
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
        raise LbylError(f"{path} has no array named 'data' of shape (N, 3072)")
    if not isinstance(labels, list) or not all(type(n) is int and 0 <= n < 100 for n in labels):
        raise LbylError(f"{path} has no list 'labels' or 'fine_labels' of integers from 0 to 99")
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(labels, np.int64)


def _read(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR file: keys as text, arrays of bytes as numpy arrays."""
    if not path.is_file():
        raise LbylError(f"no file at {path}")
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if not isinstance(content, dict):
            raise LbylError("it does not hold a dictionary")
        return {_text(key): _value(value) for key, value in content.items()}
    except Exception as error:  # a damaged pickle can fail in any way at all
        raise LbylError(f"{path} is not a readable CIFAR file: {error}") from error


class _Call:
    """A call that a pickle asks for: its arguments and the state set afterwards, never made."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    # The one written in Python: a file of 13 bytes can make that in C reserve gigabytes.
    def find_class(self, module: str, name: str) -> Any:
        if not _ALLOWED.fullmatch(f"{module}.{name}"):
            raise LbylError(f"it asks for {module}.{name}, which no image set needs; refused")
        return type(name, (_Call,), {})  # a new class, so nothing outlives the file


def _value(item: Any) -> Any:
    """The bytes or array that a `_Call` describes; anything else as it is."""
    if not isinstance(item, _Call):
        return item
    if type(item).__name__ == "encode":  # how Python 3 writes bytes in the old protocols
        return item.args[0].encode("latin1")
    if type(item).__name__ == "_reconstruct":
        _version, shape, dtype, by_column, raw = item.state
    else:
        raw, dtype, shape, order = item.args[:4]
        by_column = order == "F"
    if _text(dtype.args[0]) not in ("u1", "|u1", "uint8"):
        raise LbylError("only arrays of unsigned bytes are accepted")
    return np.frombuffer(_value(raw), np.uint8).reshape(shape, order="F" if by_column else "C")


def _text(item: Any) -> str:
    value = _value(item)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
