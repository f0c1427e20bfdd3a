"""COCO's average precision, by COCO's own code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.detection.coco import CocoImages, quiet
from lbyl.errors import LbylError
from lbyl.runtime.run import evaluation_mode

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def evaluate(
    model: nn.Module,
    source: str | Path,
    images_dir: str | Path | None = None,
    device: str | torch.device = "cpu",
    batch_size: int = 32,
    *,
    split: str = "val",
    limit: int | None = None,
    labels: str = "contiguous",
) -> dict[str, float]:
    """AP, AP50, AP75, APs, APm and APl of a torchvision-style detector, in [0, 1].

    ``source`` is an annotations file or a COCO folder. With ``labels="contiguous"`` label k means
    the k-th category, as :class:`CocoImages` counts them; with ``"category"`` labels are category
    ids, as torchvision's published detectors give them. A size of which there are no objects
    counts as NaN. The model ends on ``device``, in the mode it was in.
    """
    if labels not in ("contiguous", "category"):
        raise LbylError(f"labels {labels!r} is neither 'contiguous' nor 'category'")
    data = CocoImages(source, images_dir, split=split, limit=limit)
    names = data.categories if labels == "contiguous" else None
    model.to(device)
    detections: list[dict[str, Any]] = []
    with evaluation_mode(model):
        for start in range(0, len(data), batch_size):
            numbers = range(start, min(start + batch_size, len(data)))
            images = [data[i][0].to(device).float() / 255 for i in numbers]
            with torch.inference_mode():
                outputs = model(images)
            for i, output in zip(numbers, outputs):
                detections += _as_coco(data.ids[i], output, names)
    return average_precision(data.coco, detections, data.ids)


def average_precision(
    coco: Any,
    detections: list[dict[str, Any]] | npt.NDArray[np.float64],
    image_ids: Sequence[int] | None = None,
) -> dict[str, float]:
    """The six figures for detections in COCO's result format (image_id, category_id, bbox, score).

    ``coco`` is what :func:`open_coco` gives. Detections may also be the rows that
    :func:`detect_packed` gives.
    """
    from pycocotools.cocoeval import COCOeval

    if not len(detections):  # pycocotools cannot index an empty list
        return dict.fromkeys(METRICS, 0.0)
    with quiet():
        judge = COCOeval(coco, coco.loadRes(detections), "bbox")
        if image_ids is not None:
            judge.params.imgIds = list(image_ids)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    # COCO says -1 where there was nothing to find.
    values = [float(value) if value >= 0 else math.nan for value in judge.stats[: len(METRICS)]]
    return dict(zip(METRICS, values))


def _as_coco(
    image_id: int, output: dict[str, Tensor], categories: Sequence[int] | None
) -> list[dict[str, Any]]:
    corners = output["boxes"].float().cpu()
    sized = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
    labels, scores = output["labels"].tolist(), output["scores"].float().tolist()
    if categories is not None:
        if labels and not 1 <= min(labels) <= max(labels) <= len(categories):
            raise LbylError(
                f"the detector names class {max(labels)}, the annotations have "
                f"{len(categories)} categories: is labels='category' meant?"
            )
        labels = [categories[label - 1] for label in labels]
    return [
        {"image_id": image_id, "category_id": label, "bbox": box, "score": score}
        for box, label, score in zip(sized, labels, scores)
    ]
