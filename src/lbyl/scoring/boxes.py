"""What a detector answers: boxes. Whether two of them agree is asked of boxes, not of numbers.

Outputs are known by their form, whoever made them:

- a list with boxes, labels and scores for every image, as torchvision's detectors give;
- (n, 4 + classes, places): centres and sides in pixels, then a score between 0 and 1 for each
  class, before any were left out, as Ultralytics' heads give; what follows the scores
  (coefficients of masks, key points) is not looked at;
- (n, boxes, 6): corners, score, class, as heads give that leave out doubles themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lbyl.runtime.run import tensors_in

OVERLAP = 0.5  # of area over union: two boxes of a class that overlap so are one
DOUBLE = 0.7  # overlap from which the less sure of two boxes of one network is left out
SURE = 0.25  # a box counts from this score on
MOST = 300  # boxes of an image that are looked at
FARTHEST, COARSEST = 4.0, 2048  # times the image, or pixels: boxes end within, however unsure


@dataclass(frozen=True)
class Boxes:
    """Those of one image, the surest first."""

    corners: Tensor  # (k, 4): left, top, right, bottom
    labels: Tensor  # (k,)
    scores: Tensor  # (k,)

    def from_score(self, least: float) -> Boxes:
        sure = self.scores >= least
        return Boxes(self.corners[sure], self.labels[sure], self.scores[sure])

    def without_doubles(self) -> Boxes:
        """Of boxes of a class that overlap the surest: greedily, as detectors do."""
        clash = _overlaps(self.corners, self.corners) > DOUBLE
        clash &= self.labels[:, None] == self.labels[None]
        left = torch.ones(len(self.scores), dtype=torch.bool)
        for i in range(len(left)):
            if left[i]:
                left[i + 1 :] &= ~clash[i, i + 1 :]
        return Boxes(self.corners[left], self.labels[left], self.scores[left])


def find_boxes(output: Any, inputs: Any) -> list[Boxes] | None:
    """The boxes of every image; None where an output has none of the forms."""
    if isinstance(output, Sequence) and output and all(_is_named(x) for x in output):
        return [_sorted(x["boxes"], x["labels"], x["scores"]) for x in output]
    tensors = tensors_in(output)
    images = [x for x in tensors_in(inputs) if x.dim() == 4 and x.is_floating_point()]
    if not tensors or not images or tensors[0].dim() != 3 or len(tensors[0]) != len(images[0]):
        return None
    values, sides = tensors[0].detach().float().cpu(), images[0].shape[-2:]
    if not bool(values.isfinite().all()):
        return None
    return _from_places(values, max(sides)) or _from_rows(values, max(sides))


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and {"boxes", "labels", "scores"} <= entry.keys()


def _sorted(corners: Tensor, labels: Tensor, scores: Tensor) -> Boxes:
    scores, order = scores.detach().float().cpu().sort(descending=True, stable=True)
    order = order[:MOST]
    corners, labels = corners.detach().float().cpu(), labels.detach().cpu()
    return Boxes(corners[order], labels[order], scores[:MOST])


def _from_places(values: Tensor, side: int) -> list[Boxes] | None:
    """From (n, 4 + classes + others, places)."""
    if values.shape[1] < 5:
        return None
    centres, sizes, rest = values[:, :2], values[:, 2:4], values[:, 4:]
    between = ((rest >= 0) & (rest <= 1)).all(2).all(0)  # rows that can be scores
    classes = int(between.long().cumprod(0).sum())
    within = float(values[:, :4].abs().max()) <= _farthest(side)
    if not classes or float(sizes.min()) < 0 or float(sizes.max()) <= 1 or not within:
        return None
    scores, labels = rest[:, :classes].max(1)
    corners = torch.cat([centres - sizes / 2, centres + sizes / 2], 1).transpose(1, 2)
    return [_sorted(c, k, s) for c, k, s in zip(corners, labels, scores)]


def _from_rows(values: Tensor, side: int) -> list[Boxes] | None:
    """From (n, boxes, 6)."""
    if values.shape[2] != 6:
        return None
    corners, scores, labels = values[..., :4], values[..., 4], values[..., 5]
    ordered = bool((corners[..., 2:] >= corners[..., :2]).all())
    whole = bool((labels == labels.round()).all()) and float(labels.min()) >= 0
    between = float(scores.min()) >= 0 and float(scores.max()) <= 1
    large = 1 < float(corners.abs().max()) <= _farthest(side)
    if not (ordered and whole and between and large):
        return None
    return [_sorted(c, k.long(), s) for c, k, s in zip(corners, labels, scores)]


def _farthest(side: int) -> float:
    """In a small image the coarsest steps of a detector reach far beyond it."""
    return max(FARTHEST * side, COARSEST)


def least_score(images: Sequence[Boxes]) -> float:
    """From which score boxes count: `SURE`, or lower where there is not one an image so sure.

    On images without objects a detector is sure of little, but has its guesses all the same.
    """
    scores = torch.cat([boxes.scores for boxes in images])
    if not len(scores):
        return SURE
    rank = min(len(images), len(scores)) - 1
    return min(SURE, float(scores.sort(descending=True).values[rank]))


def agreement(ours: Sequence[Boxes], theirs: Sequence[Boxes]) -> tuple[float | None, int]:
    """The share of boxes that both networks find, and how many the first finds.

    2 · pairs / (boxes of one + boxes of the other), a pair being of one class and overlapping by
    half; None where neither finds any.
    """
    least = least_score(ours)
    pairs = total = first = 0
    for a, b in zip(ours, theirs, strict=True):
        a, b = (x.from_score(least).without_doubles() for x in (a, b))
        pairs += _pairs(a, b)
        total, first = total + len(a.scores) + len(b.scores), first + len(a.scores)
    return (2 * pairs / total if total else None), first


def _pairs(a: Boxes, b: Boxes) -> int:
    """How many boxes of `a`, the surest first, find one of `b` that no other has taken."""
    overlaps = _overlaps(a.corners, b.corners)
    overlaps[a.labels[:, None] != b.labels[None]] = 0
    taken = 0
    for row in range(len(overlaps)):
        if overlaps.shape[1] and float(overlaps[row].max()) >= OVERLAP:
            overlaps[:, int(overlaps[row].argmax())] = 0
            taken += 1
    return taken


def _overlaps(a: Tensor, b: Tensor) -> Tensor:
    """(k, l): area of the intersection over area of the union."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(x[:, 2:] - x[:, :2]).clamp(min=0).prod(1) for x in (a, b)]
    return shared / (areas[0][:, None] + areas[1][None] - shared).clamp(min=1e-12)
