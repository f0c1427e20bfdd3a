"""Images and labels in a fixed order, read batch by batch.

Encoded images are decoded only when their batch comes up, in a few threads (the decoders release
the interpreter's lock), so memory holds two batches whatever the size of the set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lbyl.errors import LbylError

Image = NDArray[np.uint8]  # (H, W, C)
Batch = tuple[Tensor, Tensor | None]


class Source(Protocol):
    """Images by index, uint8 (H, W, C) each: an array (N, H, W, C) is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ImageSet:
    """A set of images; ``labels`` is None where they are unknown.

    ``classes`` holds the names of the classes, or None where the files do not say them.
    """

    def __init__(
        self,
        source: Source,
        labels: NDArray[Any] | Sequence[int] | None,
        classes: Sequence[str] | None = None,
        name: str = "images",
        indices: NDArray[np.int64] | None = None,
    ) -> None:
        self.name = name
        self.classes = None if classes is None else tuple(classes)
        self._source = source
        self._indices = np.arange(len(source)) if indices is None else indices
        labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self._all_labels = labels
        if labels is not None and labels.shape != (len(source),):
            raise LbylError(f"{name}: {len(source)} images but labels of shape {labels.shape}")
        if labels is not None and labels.size and labels.min() < 0:
            raise LbylError(f"{name}: labels must not be negative ({labels.min()})")

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        labels = "unlabelled" if self._all_labels is None else f"{self.class_count} classes"
        return f"ImageSet({self.name}: {len(self)} images, {labels})"

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The class of each image, in the order in which the batches bring them."""
        return None if self._all_labels is None else self._all_labels[self._indices]

    @property
    def class_count(self) -> int | None:
        """Named classes, or one more than the largest label anywhere in the file."""
        if self.classes is not None:
            return len(self.classes)
        if self._all_labels is None or not self._all_labels.size:
            return None
        return int(self._all_labels.max()) + 1

    @property
    def total(self) -> int:
        """Images in the file behind this set, of which this may be a subset."""
        return len(self._source)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the first image."""
        if not len(self):
            raise LbylError(f"{self.name} holds no images")
        height, width, channels = self._source[int(self._indices[0])].shape
        return channels, height, width

    def subset(self, n: int, seed: int = 0) -> ImageSet:
        """``n`` images drawn without replacement, the same ones for the same seed."""
        if not 0 < n <= len(self):
            raise LbylError(f"{self.name}: cannot take {n} of {len(self)} images")
        # RandomState's stream is frozen for good; that of newer generators may change.
        drawn = np.random.RandomState(seed).permutation(len(self))[:n]
        indices = self._indices[np.sort(drawn)]
        return ImageSet(self._source, self._all_labels, self.classes, self.name, indices)

    def batches(
        self,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: str | torch.device = "cpu",
        limit: int | None = None,
    ) -> Iterator[Batch]:
        """Yield (float images NCHW normalised by ``mean`` and ``std``, labels or None) in order."""
        if batch_size < 1:
            raise LbylError(f"batch_size must be at least 1, not {batch_size}")
        if limit is not None and limit < 1:
            raise LbylError(f"limit must be at least 1, not {limit}")
        if len(mean) != len(std) or not len(mean) or min(std) <= 0:
            raise LbylError(f"mean {tuple(mean)} and std {tuple(std)}: one positive std per mean")

        def normalised() -> Iterator[Batch]:  # apart, so that wrong arguments are refused at once
            for indices, images in self._arrays(self._indices[:limit], batch_size):
                x = self._normalise(torch.from_numpy(images).to(device), mean, std)
                labels = None if self._all_labels is None else self._all_labels[indices]
                yield x, None if labels is None else torch.from_numpy(labels).to(device)

        return normalised()

    def pixels(self, limit: int | None = None) -> Image:
        """The first ``limit`` images, or all, as they are: uint8 (N, H, W, C) in memory."""
        indices = self._indices[:limit]
        if not len(indices):
            raise LbylError(f"{self.name} holds no images")
        return np.concatenate([images for _, images in self._arrays(indices, 1000)])

    def _normalise(self, images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """uint8 NHWC to float NCHW; not by torchvision, which arrays of pixels do not need."""
        channels = images.shape[-1]
        if len(mean) not in (1, channels):
            raise LbylError(f"{self.name}: images have {channels} channel(s), mean has {len(mean)}")
        x = images.permute(0, 3, 1, 2).to(torch.float32).div_(255.0).contiguous()
        x.sub_(torch.tensor(mean, device=x.device).view(1, -1, 1, 1))
        return x.div_(torch.tensor(std, device=x.device).view(1, -1, 1, 1))

    def _arrays(self, indices: NDArray[np.int64], size: int) -> Iterator[tuple[Any, Image]]:
        """(indices, images (N, H, W, C)) for each ``size`` indices, decoding one batch ahead."""
        chunks = [indices[i : i + size] for i in range(0, len(indices), size)]
        if isinstance(self._source, np.ndarray):
            yield from ((chunk, self._source[chunk]) for chunk in chunks)
            return
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        decoding: list[Iterator[Image]] = []
        try:
            for i, chunk in enumerate(chunks):
                for ahead in chunks[i + len(decoding) : i + 2]:
                    decoding.append(pool.map(self._source.__getitem__, ahead.tolist()))
                yield chunk, self._stack(list(decoding.pop(0)))
        finally:  # also reached when the caller stops early: what waits is not decoded
            pool.shutdown(cancel_futures=True)

    def _stack(self, images: list[Image]) -> Image:
        shapes = sorted({image.shape for image in images})
        if len(shapes) > 1:
            two = f"{shapes[0]} and {shapes[1]}"
            raise LbylError(f"{self.name}: images differ in shape ({two}); load them with size=")
        return np.stack(images)
