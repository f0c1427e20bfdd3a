"""Images and labels in a fixed order, read batch by batch.

A source is anything with a length that gives image ``i`` as uint8 of shape (H, W, C): an array
does already. Encoded images are decoded only when their batch comes up, in a few threads (the
decoders release the interpreter's lock), so memory holds two batches whatever the size of the set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lbyl.exceptions import LbylError

Image = NDArray[np.uint8]  # (H, W, C)
Batch = tuple[Tensor, Tensor | None]


class Source(Protocol):
    """Images by position."""

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
        self._all_labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self._indices = np.arange(len(source)) if indices is None else indices
        if self._all_labels is not None:
            self._check_labels(self._all_labels)

    def _check_labels(self, labels: NDArray[np.int64]) -> None:
        if labels.shape != (len(self._source),):
            count = len(self._source)
            raise LbylError(f"{self.name}: {count} images but labels of shape {labels.shape}")
        if labels.size and labels.min() < 0:
            raise LbylError(f"{self.name}: labels must not be negative (found {labels.min()})")

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
        height, width, channels = self._image(int(self._indices[0])).shape
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
        return self._batches(batch_size, _Scale(mean, std, self.name), device, limit)

    def pixels(self, limit: int | None = None) -> Image:
        """The first ``limit`` images, or all, as they are: uint8 (N, H, W, C) in memory."""
        order = self._indices[:limit]
        if not len(order):
            raise LbylError(f"{self.name} holds no images")
        chunks = [order[i : i + 1000] for i in range(0, len(order), 1000)]
        return np.concatenate(list(self._stacks(chunks)))

    def _batches(
        self, batch_size: int, scale: _Scale, device: str | torch.device, limit: int | None
    ) -> Iterator[Batch]:
        order = self._indices[:limit]
        chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        for chunk, images in zip(chunks, self._stacks(chunks)):
            labels = None if self._all_labels is None else self._all_labels[chunk]
            target = None if labels is None else torch.from_numpy(labels).to(device)
            yield scale(torch.from_numpy(images).to(device)), target

    def _stacks(self, chunks: list[NDArray[np.int64]]) -> Iterator[Image]:
        """The images of each chunk as one array (N, H, W, C), decoding one chunk ahead."""
        if isinstance(self._source, np.ndarray):
            yield from (self._source[chunk] for chunk in chunks)
            return
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        ahead: list[list[Future[Image]]] = []
        try:
            for chunk in chunks:
                ahead.append([pool.submit(self._image, int(i)) for i in chunk])
                if len(ahead) > 1:
                    yield self._gather(ahead.pop(0))
            if ahead:
                yield self._gather(ahead.pop())
        finally:  # also reached when the caller stops early: do not decode for nobody
            pool.shutdown(cancel_futures=True)

    def _image(self, index: int) -> Image:
        image: Image = self._source[index]
        return image

    def _gather(self, futures: list[Future[Image]]) -> Image:
        images = [future.result() for future in futures]
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            two = " and ".join(str(shape) for shape in sorted(shapes)[:2])
            raise LbylError(f"{self.name}: images differ in shape ({two}); load them with size=")
        return np.stack(images)


class _Scale:
    """uint8 NHWC to normalised float NCHW, on whatever device the images are."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], name: str) -> None:
        if len(mean) != len(std) or not len(mean) or min(std) <= 0:
            raise LbylError(f"mean {tuple(mean)} and std {tuple(std)}: one positive std per mean")
        self.mean, self.std, self.name = tuple(mean), tuple(std), name

    def __call__(self, images: Tensor) -> Tensor:
        channels = images.shape[-1]
        if len(self.mean) not in (1, channels):
            raise LbylError(
                f"{self.name}: images have {channels} channel(s) but mean has {len(self.mean)}"
            )
        x = images.permute(0, 3, 1, 2).to(torch.float32).div_(255.0).contiguous()
        mean = torch.tensor(self.mean, device=x.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=x.device).view(1, -1, 1, 1)
        return x.sub_(mean).div_(std)
