"""A whole detection set in a few tensors, so that a GPU never waits for a file or a Python loop."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.detection.coco import CocoImages


@dataclass(frozen=True)
class PackedImages:
    """Decoded images of one size with their objects, padded to the most that one image has."""

    images: Tensor  # uint8 (N, 3, size, size)
    boxes: Tensor  # (N, M, 4): x1, y1, x2, y2 in the packed image's pixels
    labels: Tensor  # (N, M), 0 where an image has fewer objects
    scale: Tensor  # (N, 4): from the packed image's pixels to the file's
    ids: tuple[int, ...]
    categories: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> int:
        return int(self.images.shape[-1])

    def to(self, device: str | torch.device) -> PackedImages:
        names = ("images", "boxes", "labels", "scale")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def shuffled(
        self, batch_size: int, generator: torch.Generator, flip: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches (images in [0, 1], boxes, labels) in random order, half of them mirrored."""
        device = self.images.device
        # Drawn on the CPU, so that every device sees the same order; moved over once an epoch.
        order = torch.randperm(len(self), generator=generator).to(device)
        mirrored = (torch.rand(len(self), generator=generator) < 0.5 * flip).to(device)
        for start in range(0, len(self), batch_size):
            chosen = order[start : start + batch_size]
            turned = mirrored[start : start + batch_size]
            images, boxes = self.images[chosen], self.boxes[chosen]
            if flip:
                images = torch.where(turned.view(-1, 1, 1, 1), images.flip(-1), images)
                boxes = torch.where(turned.view(-1, 1, 1), self._mirror(boxes), boxes)
            yield images.float() / 255, boxes, self.labels[chosen]

    def _mirror(self, boxes: Tensor) -> Tensor:
        x1, y1, x2, y2 = boxes.unbind(-1)
        return torch.stack([self.size - x2, y1, self.size - x1, y2], dim=-1)


def pack_images(data: CocoImages, size: int, threads: int = 8) -> PackedImages:
    """Decode all images of a COCO set at ``size`` x ``size``."""
    images = torch.empty(len(data), 3, size, size, dtype=torch.uint8)
    original = torch.empty(len(data), 2)

    def decode(index: int) -> tuple[Tensor, Tensor]:
        image, target = data[index]
        height, width = image.shape[-2:]
        original[index] = torch.tensor([width, height], dtype=torch.float32)
        if (height, width) != (size, size):
            scaled = F.interpolate(image[None].float(), (size, size), mode="bilinear")
            image = scaled[0].round().byte()
        images[index] = image
        return target["boxes"], target["labels"]

    # Decoding leaves Python's lock, so that threads do, and no tensor travels between processes.
    with ThreadPoolExecutor(max(1, threads)) as pool:
        targets = list(pool.map(decode, range(len(data))))
    scale = (original / size).repeat(1, 2)
    most = max(1, *(len(labels) for _, labels in targets))
    boxes = torch.zeros(len(data), most, 4)
    labels = torch.zeros(len(data), most, dtype=torch.int64)
    for index, (box, label) in enumerate(targets):
        boxes[index, : len(label)] = box / scale[index]
        labels[index, : len(label)] = label
    return PackedImages(images, boxes, labels, scale, tuple(data.ids), tuple(data.categories))
