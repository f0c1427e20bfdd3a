"""Object detection: a drawn COCO set, a small SSD, its training and COCO's average precision."""

from __future__ import annotations

from benchmarks.detection.batched import detect_packed
from benchmarks.detection.coco import CocoImages, find_coco
from benchmarks.detection.draw import CLASSES, DrawConfig, draw_detection_set
from benchmarks.detection.evaluate import average_precision, evaluate
from benchmarks.detection.packed import PackedImages, pack_images
from benchmarks.detection.ssd import build_ssd
from benchmarks.detection.train import train_detector

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
