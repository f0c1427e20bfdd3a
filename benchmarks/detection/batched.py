"""torchvision's SSD on whole batches: the same loss and detections, no loop over images.

torchvision matches, scores and suppresses image by image and class by class, and asks the GPU for
an answer at each. That costs milliseconds an image, many times the network itself on small ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.detection.packed import PackedImages
from benchmarks.detection.ssd import feature_sizes
from lbyl.runtime.run import device_of, evaluation_mode


def default_boxes(model: nn.Module, size: int) -> Tensor:
    """The (A, 4) default boxes of an SSD for images of ``size`` x ``size``, on its device."""
    from torchvision.models.detection.image_list import ImageList

    detector: Any = model
    maps = [torch.empty(0, 0, *sides) for sides in feature_sizes(model, size)]
    images = ImageList(torch.empty(0, 3, size, size), [(size, size)])
    boxes: Tensor = detector.anchor_generator(images, maps)[0]
    return boxes.to(device_of(model))


def ssd_losses(
    model: nn.Module,
    images: Tensor,
    boxes: Tensor,
    labels: Tensor,
    anchors: Tensor,
    *,
    bf16: bool = False,
) -> dict[str, Tensor]:
    """What ``model(images, targets)`` gives in training, for images (B, 3, size, size) in [0, 1].

    ``boxes`` (B, M, 4) and ``labels`` (B, M) are padded with label 0. With ``bf16`` the network
    runs in it; boxes are compared in float32, which half a pixel needs.
    """
    detector: Any = model
    logits, codes = _heads(detector, images, bf16)
    owner = match(anchors, boxes, labels, detector.proposal_matcher.high_threshold)
    matched = owner >= 0
    index = owner.clamp(min=0)
    wanted_label = torch.where(matched, labels.gather(1, index), 0)
    wanted_box = boxes.gather(1, index[..., None].expand(-1, -1, 4))
    # Background stands on its own default box: finite, and left out below.
    wanted_box = torch.where(matched[..., None], wanted_box, anchors)
    coder = detector.box_coder
    wanted = coder.encode_single(wanted_box.flatten(0, 1), anchors.repeat(len(images), 1))
    apart = F.smooth_l1_loss(codes, wanted.view_as(codes), reduction="none").sum(-1)
    wrong = F.cross_entropy(logits.flatten(0, 1), wanted_label.flatten(), reduction="none")
    wrong = wrong.view_as(apart)
    # Of the background only the hardest count, three to an object.
    hardest = torch.where(matched, -torch.inf, wrong).sort(1, descending=True).values
    rank = torch.arange(hardest.shape[1], device=hardest.device)
    counted = rank < detector.neg_to_pos_ratio * matched.sum(1, keepdim=True)
    hard = torch.where(counted & hardest.isfinite(), hardest, 0).sum()
    total = matched.sum().clamp(min=1)
    return {
        "bbox_regression": torch.where(matched, apart, 0).sum() / total,
        "classification": (torch.where(matched, wrong, 0).sum() + hard) / total,
    }


def match(anchors: Tensor, boxes: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """(B, A): which object each default box answers for, -1 for none.

    The one that overlaps it most, from ``threshold`` on; and every object gets its best box.
    """
    from torchvision.ops import box_iou

    present = labels > 0
    overlap = box_iou(boxes.flatten(0, 1), anchors).view(*labels.shape, len(anchors))
    overlap = overlap.masked_fill(~present[..., None], -1)
    best, owner = overlap.max(dim=1)
    owner = torch.where(best >= threshold, owner, -1)
    numbers = torch.where(present, torch.arange(labels.shape[1], device=labels.device), -1)
    forced = torch.full_like(owner, -1)
    forced.scatter_reduce_(1, overlap.argmax(dim=2), numbers, "amax")
    return torch.where(forced >= 0, forced, owner)


def _heads(detector: Any, images: Tensor, bf16: bool) -> tuple[Tensor, Tensor]:
    """Class logits (B, A, classes) and box codes (B, A, 4) in float32."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        features = detector.backbone(detector.transform.normalize(images))
        outputs = detector.head(list(features.values()))
    return outputs["cls_logits"].float(), outputs["bbox_regression"].float()


@torch.inference_mode()
def ssd_detections(
    model: nn.Module, images: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What an SSD in evaluation gives for a batch: boxes (B, D, 4), labels, scores (B, D).

    The best first; where an image has fewer than D, the score is 0.
    """
    detector: Any = model
    logits, codes = _heads(detector, images, bf16=False)
    scores = logits.softmax(-1)[..., 1:].transpose(1, 2)  # (B, classes, A)
    count = min(detector.topk_candidates, scores.shape[-1])
    scores, chosen = scores.topk(count)
    valid = scores > detector.score_thresh
    # Few classes have that many candidates: no need to compare those below the threshold.
    count = max(1, int(valid.sum(-1).max()))
    scores, chosen, valid = scores[..., :count], chosen[..., :count], valid[..., :count]
    flat = detector.box_coder.decode_single(codes.flatten(0, 1), anchors.repeat(len(images), 1))
    boxes = flat.view(len(images), 1, -1, 4).clamp(0, images.shape[-1])
    corners = chosen[..., None].expand(-1, -1, -1, 4)
    boxes = boxes.expand(-1, scores.shape[1], -1, -1).gather(2, corners)
    kept = suppress(boxes.flatten(0, 1), valid.flatten(0, 1), detector.nms_thresh)
    scores = torch.where(kept.view_as(valid), scores, 0).flatten(1)
    top, index = scores.topk(min(detector.detections_per_img, scores.shape[1]))
    boxes = boxes.flatten(1, 2).gather(1, index[..., None].expand(-1, -1, 4))
    return boxes, index // count + 1, top


def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Greedy non-maximum suppression in each group: boxes (G, K, 4), the best first."""
    if boxes.device.type == "cpu":
        return _suppress_by_group(boxes, valid, threshold)
    return _suppress_together(boxes, valid, threshold)


def _suppress_by_group(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """torchvision's, which on a CPU looks only at pairs that matter."""
    from torchvision.ops import nms

    kept = torch.zeros_like(valid)
    for group, inside in enumerate(valid):
        indices = inside.nonzero().flatten()
        falling = torch.arange(len(indices), 0, -1, dtype=boxes.dtype)
        kept[group, indices[nms(boxes[group, indices], falling, threshold)]] = True
    return kept


def _suppress_together(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """All groups at once, for a GPU.

    Who is kept depends only on those before: repeated until nothing changes, the answer is the
    greedy one, after as many rounds as the longest chain has links.
    """
    over = _overlaps(boxes, threshold).triu(1)
    kept = valid
    while True:
        again = valid & ~(over & kept[:, :, None]).any(dim=1)
        if torch.equal(again, kept):
            return kept
        kept = again


def _overlaps(boxes: Tensor, threshold: float) -> Tensor:
    """(G, K, K): whether the intersection over union of two boxes of a group is above."""
    first, second = boxes[:, :, None], boxes[:, None]
    sides = torch.minimum(first[..., 2:], second[..., 2:])
    sides = (sides - torch.maximum(first[..., :2], second[..., :2])).clamp(min=0)
    shared = sides[..., 0] * sides[..., 1]
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    return shared > threshold * (area[:, :, None] + area[:, None] - shared)


def detect_packed(
    model: nn.Module, data: PackedImages, batch_size: int = 64
) -> npt.NDArray[np.float64]:
    """All detections of an SSD as COCO's rows: image id, x, y, width, height, score, category."""
    anchors = default_boxes(model, data.size)
    ids = torch.tensor(data.ids, device=data.images.device)
    categories = torch.tensor(data.categories, device=data.images.device)
    parts = []
    for start in range(0, len(data), batch_size):
        part = slice(start, start + batch_size)
        with evaluation_mode(model):
            boxes, labels, scores = ssd_detections(model, data.images[part].float() / 255, anchors)
        boxes = boxes * data.scale[part, None]
        columns = [
            ids[part, None].expand_as(scores)[..., None],
            torch.cat([boxes[..., :2], boxes[..., 2:] - boxes[..., :2]], -1),
            scores[..., None],
            categories[labels - 1][..., None],
        ]
        parts.append(torch.cat([column.double() for column in columns], -1)[scores > 0])
    rows: npt.NDArray[np.float64] = torch.cat(parts).cpu().numpy()
    return rows
