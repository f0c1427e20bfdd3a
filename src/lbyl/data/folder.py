"""Folders of pictures: a subfolder a class, or a flat folder without labels."""

from __future__ import annotations

from pathlib import Path

from lbyl.data.imageset import ImageSet
from lbyl.data.pictures import FilePictures
from lbyl.exceptions import LbylError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
DEFAULT_SIZE = 224
_SPLITS = {"test": ("test", "val"), "train": ("train",)}


def read_folder(root: Path, split: str, size: int | None = None) -> ImageSet:
    """Pictures under ``root`` (or its subfolder for the split), classes in alphabetical order."""
    folder = _split_folder(root, split)
    size = size or DEFAULT_SIZE
    classes = sorted(d.name for d in folder.iterdir() if d.is_dir() and not _hidden(d))
    files = [(path, i) for i, name in enumerate(classes) for path in _pictures(folder / name, True)]
    if files:
        paths = [path for path, _ in files]
        labels = [label for _, label in files]
        return ImageSet(FilePictures(paths, size), labels, classes, name=str(folder))
    flat = _pictures(folder, False)
    if not flat:
        raise LbylError(
            f"{folder} holds nothing readable: expected pictures ({', '.join(sorted(SUFFIXES))}), "
            "class subfolders of them, idx files, or torchvision's CIFAR folders"
        )
    return ImageSet(FilePictures(flat, size), None, name=str(folder))


def _split_folder(root: Path, split: str) -> Path:
    for name in _SPLITS[split]:
        if (root / name).is_dir():
            return root / name
    return root


def _pictures(folder: Path, deep: bool) -> list[Path]:
    found = folder.rglob("*") if deep else folder.iterdir()
    wanted = (p for p in found if p.suffix.lower() in SUFFIXES and p.is_file() and not _hidden(p))
    return sorted(wanted)


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")
