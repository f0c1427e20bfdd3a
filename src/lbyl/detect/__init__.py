"""Object detection: a drawn COCO set, a small SSD, its training and COCO's average precision."""

from __future__ import annotations

from lbyl.detect.batched import detect_packed
from lbyl.detect.coco import CocoImages, find_coco
from lbyl.detect.draw import CLASSES, DrawConfig, draw_detection_set
from lbyl.detect.evaluate import average_precision, evaluate
from lbyl.detect.packed import PackedImages, pack_images
from lbyl.detect.ssd import build_ssd
from lbyl.detect.train import train_detector

__all__ = [
    "CLASSES",
    "CocoImages",
    "DrawConfig",
    "PackedImages",
    "average_precision",
    "build_ssd",
    "detect_packed",
    "draw_detection_set",
    "evaluate",
    "find_coco",
    "pack_images",
    "train_detector",
]
