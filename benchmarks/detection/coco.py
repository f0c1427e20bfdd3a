"""COCO on disk: where its parts lie, and its images with boxes as a dataset."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lbyl.errors import LbylError

Target = dict[str, Tensor]


def find_coco(
    source: str | Path, images_dir: str | Path | None = None, split: str = "val"
) -> tuple[Path, Path]:
    """The annotations and the folder of images.

    ``source`` is the JSON file, or a folder laid out as COCO's:
    ``annotations/instances_val2017.json`` beside ``val2017/`` (or ``images/val2017/``).
    """
    source = Path(source)
    annotations = source if source.is_file() else _find_annotations(source, split)
    if images_dir is not None:
        folder = Path(images_dir)
        if not folder.is_dir():
            raise LbylError(f"there is no folder of images {folder}")
        return annotations, folder
    part = annotations.stem.removeprefix("instances_")
    root = annotations.parent.parent
    folders = [root / part, root / "images" / part, root / "images"]
    for folder in folders:
        if folder.is_dir():
            return annotations, folder
    looked = ", ".join(map(str, folders))
    raise LbylError(f"no images for {annotations}: looked for {looked}; give images_dir")


def _find_annotations(folder: Path, split: str) -> Path:
    exact = folder / "annotations" / f"instances_{split}.json"
    files = [exact] if exact.is_file() else sorted(exact.parent.glob(f"instances_{split}*.json"))
    if not files:
        raise LbylError(f"{folder} holds no annotations/instances_{split}*.json")
    return files[-1]  # of several years the latest


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """pycocotools reports every step on the standard output; a library should not."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def open_coco(annotations: str | Path) -> Any:
    """The ``pycocotools`` index of an annotations file."""
    try:
        from pycocotools.coco import COCO
    except ImportError as error:
        raise LbylError("detection needs pycocotools: pip install 'lbyl[bench]'") from error
    try:
        with quiet():
            return COCO(str(annotations))
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise LbylError(f"{annotations} is not a COCO annotations file: {error}") from error


class CocoImages(Dataset[tuple[Tensor, Target]]):
    """Images as uint8 (3, H, W) with ``boxes`` (x1, y1, x2, y2), ``labels`` and ``image_id``.

    Labels count the categories from 1 in the order of their ids, leaving 0 to the background.
    Crowds are left out, as COCO's own evaluation does not ask for them. With ``cache``, decoded
    images stay in memory, which makes every epoch but the first one cheap.
    """

    def __init__(
        self,
        source: str | Path,
        images_dir: str | Path | None = None,
        *,
        split: str = "train",
        limit: int | None = None,
        cache: bool = False,
    ) -> None:
        annotations, self.folder = find_coco(source, images_dir, split)
        self.coco = open_coco(annotations)
        self.ids: list[int] = sorted(self.coco.getImgIds())[:limit]
        self.categories: list[int] = sorted(self.coco.getCatIds())
        self._label = {category: i for i, category in enumerate(self.categories, start=1)}
        self._cache: dict[int, Tensor] | None = {} if cache else None
        if not self.ids:
            raise LbylError(f"{annotations} lists no images")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image_id = self.ids[index]
        return self._image(image_id), self._target(image_id)

    def _image(self, image_id: int) -> Tensor:
        if self._cache is not None and image_id in self._cache:
            return self._cache[image_id]
        from PIL import Image

        path = self.folder / self.coco.imgs[image_id]["file_name"]
        try:
            with Image.open(path) as picture:
                pixels = np.array(picture.convert("RGB"))
        except (OSError, ImportError) as error:  # Ultralytics makes PIL look for further readers
            raise LbylError(f"cannot read image {path}: {error}") from error
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        if self._cache is not None:
            self._cache[image_id] = image
        return image

    def _target(self, image_id: int) -> Target:
        kept = [
            item
            for item in self.coco.imgToAnns[image_id]
            if not item.get("iscrowd", 0) and min(item["bbox"][2:]) > 0
        ]
        boxes = torch.tensor([item["bbox"] for item in kept], dtype=torch.float32).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([self._label[i["category_id"]] for i in kept], dtype=torch.int64)
        return {"boxes": boxes, "labels": labels, "image_id": torch.tensor(image_id)}
