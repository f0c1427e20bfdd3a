"""Does the share of boxes that agree, told without data, rank slim detectors as precision does?

A tiny YOLO is trained by Ultralytics on drawn shapes, pruned and restored in several ways, and
measured by Ultralytics on shapes it has not seen. `python -m benchmarks.detection.yolo` prints and
keeps the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lbyl
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from benchmarks.detection.draw import CLASSES, DrawConfig, draw_detection_set
from lbyl.app.sources import resolve
from lbyl.app.sources.yolo import as_yolo

TINY = """
nc: 6
backbone:
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, C3k2, [32, False, 0.5]]
  - [-1, 1, Conv, [48, 3, 2]]
  - [-1, 1, C3k2, [48, False, 0.5]]
  - [-1, 1, SPPF, [48, 5]]
head:
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 2], 1, Concat, [1]]
  - [-1, 1, C3k2, [32, False]]
  - [[8, 5], 1, Detect, [nc]]
"""
RATIOS, METHODS = (0.1, 0.2, 0.3, 0.4, 0.5), ("echo", "none")


def yolo_set(folder: Path, images: Mapping[str, int], size: int) -> Path:
    """The drawn shapes in Ultralytics' format; gives the path of their data.yaml."""
    for split, count in images.items():
        told = json.loads(
            draw_detection_set(folder / split, DrawConfig(count, size), split).read_text()
        )
        names = {image["id"]: Path(image["file_name"]).stem for image in told["images"]}
        (folder / split / split).rename(folder / split / "images")
        labels = folder / split / "labels"
        labels.mkdir()
        for item in told["annotations"]:
            x, y, w, h = (value / size for value in item["bbox"])
            with (labels / f"{names[item['image_id']]}.txt").open("a") as file:
                file.write(f"{item['category_id'] - 1} {x + w / 2} {y + h / 2} {w} {h}\n")
    listed = "\n".join(f"  {i}: {name}" for i, name in enumerate(CLASSES))
    splits = "\n".join(f"{split}: {split}/images" for split in images)
    (folder / "data.yaml").write_text(f"path: {folder}\n{splits}\nnames:\n{listed}\n")
    return folder / "data.yaml"


def measure(folder: Path, epochs: int, size: int) -> list[dict[str, Any]]:
    """A row for every method and ratio; the first is the original."""
    from ultralytics import YOLO

    (folder / "tiny.yaml").write_text(TINY)
    options: dict[str, Any] = {
        "data": str(yolo_set(folder, {"train": 800, "val": 200}, size)), "imgsz": size,
        "device": "cpu", "workers": 0, "plots": False, "verbose": False, "project": str(folder),
    }  # fmt: skip
    trained = YOLO(str(folder / "tiny.yaml"))
    trained.train(epochs=epochs, batch=32, lr0=0.01, optimizer="AdamW", mosaic=0.0, **options)
    network = resolve(f"ultralytics:{trained.trainer.last}", input_shape=(size,))
    prepared = lbyl.prepare(network.model, network.example)

    def precision(model: Any) -> float:
        return float(as_yolo(model, folder / "slim.pt").val(**options).box.map50)

    rows = [{"method": "original", "ratio": 0.0, "map50": precision(network.model)}]
    for method in METHODS:
        for ratio in RATIOS:
            result = prepared.compress({"*": ratio}, criterion="l2", method=method)
            told = result.forecast
            assert told is not None
            figures = {"agreement": told.agreement, "boxes": told.boxes}
            rows.append({"method": method, "ratio": ratio, "map50": precision(result.model)})
            rows[-1] |= figures
    return rows


def main(arguments: list[str]) -> None:
    """Run it, print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=64)
    given = parser.parse_args(arguments)
    os.environ.setdefault("YOLO_OFFLINE", "true")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), given.epochs, given.size)
    columns = ["method", "ratio", "agreement", "map50"]
    print_table("boxes that agree", columns, [[row.get(c) for c in columns] for row in rows])
    save_results("detection-yolo", {"epochs": given.epochs, "size": given.size, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
