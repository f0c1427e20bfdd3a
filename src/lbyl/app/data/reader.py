"""`load`: what lies at a path decides how it is read."""

from __future__ import annotations

from pathlib import Path

from lbyl.app.data.arrays import idx_folders, read_digits, read_idx, read_npz
from lbyl.app.data.cifar import cifar_folders, read_cifar
from lbyl.app.data.imageset import ImageSet
from lbyl.app.data.pictures import read_folder
from lbyl.errors import LbylError

_SPLITS = {"test": "test", "val": "test", "train": "train"}


def load(path: str | Path, split: str = "test", size: int | None = None) -> ImageSet:
    """Open an image set.

    ``path`` is an ``.npz`` file; a folder of MNIST or FashionMNIST idx files; the root folder
    given to ``torchvision.datasets`` for MNIST, FashionMNIST, CIFAR-10 or CIFAR-100; a folder of
    pictures, with a subfolder for each class or without labels; or the word ``"digits"``.
    ``size`` brings pictures to ``size`` × ``size`` (folders: 224 unless said otherwise).
    A file holds one split only, so ``split`` chooses inside folders.
    """
    if split not in _SPLITS:
        raise LbylError(f"split must be 'test', 'val' or 'train', not {split!r}")
    split = _SPLITS[split]
    if size is not None and size < 1:
        raise LbylError(f"size must be at least 1, not {size}")
    if path == "digits":
        return read_digits(split, size)
    path = Path(path).expanduser()
    if path.is_dir():
        return _load_folder(path.resolve(), split, size)
    if not path.is_file():
        raise LbylError(f"there is no file or folder at {path}")
    if path.suffix == ".npz":
        return read_npz(path, size)
    if "-images" in path.name and "idx3-ubyte" in path.name:
        return read_idx(path, split, size)
    raise LbylError(f"{path}: an image file set must be .npz or *-images-idx3-ubyte[.gz]")


def _load_folder(root: Path, split: str, size: int | None) -> ImageSet:
    idx, cifar = idx_folders(root), cifar_folders(root)
    if len(idx + cifar) > 1:
        folders = ", ".join(str(folder) for folder in idx + cifar)
        raise LbylError(f"{root} holds several image sets; give the path of one: {folders}")
    if idx:
        return read_idx(idx[0], split, size)
    if cifar:
        return read_cifar(cifar[0], split, size)
    return read_folder(root, split, size)
