"""Detectors, segmenters and classifiers of ultralytics, from the recipes that it comes with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from support.published import Build

SIZE = 64
NAMES = """
yolov3-tiny yolov5n yolov5n-p6 yolov6n yolov8n yolov8n-p2 yolov8n-p6 yolov8n-ghost yolov8n-seg
yolov8n-pose yolov8n-obb yolov8n-cls yolov8n-world yolov8n-worldv2 yolov9t yolov10n yolo11n-seg
yolo11n-pose yolo11n-obb yolo11n-cls yolo12n yolo12n-seg yolo12n-cls yolo26n yolo26n-seg
yolo26n-pose yolo26n-obb yolo26n-cls yolo26n-depth yolo26n-sem yolo26n-p2 yolo11n yolov8n-rtdetr
yoloe-11n yoloe-26n
""".split()


def build(name: str) -> tuple[nn.Module, Any]:
    """A network with random weights, and a picture of few pixels."""
    from ultralytics import RTDETR, YOLO, YOLOE, YOLOWorld
    from ultralytics.utils import LOGGER

    LOGGER.setLevel("ERROR")
    kinds = {"rtdetr": RTDETR, "yoloe": YOLOE, "world": YOLOWorld}
    kind = next((kind for part, kind in kinds.items() if part in name), YOLO)
    model: nn.Module = kind(f"{name}.yaml").model
    if hasattr(model, "txt_feats"):  # drawn at random as long as no words were given, and not saved
        generator = torch.Generator().manual_seed(0)
        model.txt_feats = torch.randn(model.txt_feats.shape, generator=generator)
    return model, torch.rand(1, 3, SIZE, SIZE)


def builds() -> dict[str, Build]:
    return {name: partial(build, name) for name in NAMES}
