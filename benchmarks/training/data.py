"""What is fed, in which order, in what form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.training.config import TrainConfig, require
from lbyl.errors import LbylError

Batches = list[list[int]]
Data = Any  # a torch Dataset of (image, label), or a pair of (images, labels) tensors


class Pair(Dataset[Any]):
    """Two tensors side by side, read a whole batch at a time.

    Labels are whole numbers (N), or probabilities (N, classes) to learn from.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


def collate(batch: Any) -> tuple[Tensor, Tensor]:
    """A pair comes as a batch already; the items of another dataset still have to be stacked."""
    if isinstance(batch, tuple):
        return cast("tuple[Tensor, Tensor]", batch)
    images, labels = default_collate(batch)
    return images, labels


def as_dataset(data: Data, name: str, soft: bool = False) -> Dataset[Any]:
    """Whatever was given, with a length and items; probabilities as labels only where ``soft``."""
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape"):
        images, labels = torch.as_tensor(data[0]), torch.as_tensor(data[1])
        require(
            len(images) == len(labels), f"{name}: {len(images)} images but {len(labels)} labels"
        )
        soft = soft and labels.ndim == 2 and labels.is_floating_point()
        whole = labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()
        require(
            soft or whole,
            f"{name}: labels must be one whole number an image, not {labels.dtype} "
            f"of shape {tuple(labels.shape)}",
        )
        dataset: Dataset[Any] = Pair(images, labels.float() if soft else labels.long())
    else:
        dataset = data
    require(
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"),
        f"{name}: expected a dataset with a length, or a pair (images, labels), "
        f"not {type(data).__name__}",
    )
    require(length(dataset) > 0, f"{name} is empty")
    return dataset


def length(dataset: Dataset[Any]) -> int:
    return len(cast("Sequence[Any]", dataset))


def seed_of(*parts: int) -> int:
    """One seed out of several numbers, with none of the collisions of adding them up."""
    return int(np.random.SeedSequence([part % 2**32 for part in parts]).generate_state(1)[0])


def epoch_order(count: int, config: TrainConfig, epoch: int) -> Tensor:
    """The images of one epoch, shuffled by the seed and the epoch and by nothing else."""
    generator = torch.Generator().manual_seed(seed_of(config.seed, 0))
    order = torch.arange(count)
    if config.limit is not None and config.limit < count:
        order = torch.randperm(count, generator=generator)[: config.limit]
    generator.manual_seed(seed_of(config.seed, 1, epoch))
    return order[torch.randperm(len(order), generator=generator)]


def training_batches(order: Tensor, size: int, rank: int, world: int) -> list[list[int]]:
    """This process's share of every batch.

    All shares of a batch are equally long (the first images serve twice if need be), because the
    gradients of the processes are averaged with equal weight.
    """
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if len(batches) > 1 and len(batches[-1]) < 2 * world:
        batches.pop()  # BatchNorm cannot normalise a lone image: leave it to another epoch
    shares = []
    for batch in batches:
        even = math.ceil(len(batch) / world) * world
        shares.append(batch.repeat(world)[:even][rank::world].tolist())
    return shares


def read_batches(
    data: Dataset[Any], batches: Batches, device: torch.device, workers: int, classes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches on the device, in order; tensors that lie there already are only indexed."""
    if isinstance(data, Pair) and _lies_on(data, device):
        yield from _indexed(data, batches, device)
        return
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    for images, labels in loader:
        if not isinstance(data, Pair):  # a pair's labels were seen all at once
            check_range(labels, classes, "the data")
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def _lies_on(data: Pair, device: torch.device) -> bool:
    return (
        data.images.get_device()
        == data.labels.get_device()
        == torch.empty(0, device=device).get_device()
    )


def _indexed(data: Pair, batches: Batches, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """One transfer of the whole order, so that no batch waits for one of its own."""
    order = torch.tensor([index for batch in batches for index in batch]).to(device)
    for chosen in order.split([len(batch) for batch in batches]):
        yield data.images[chosen], data.labels[chosen]


class Preparation:
    """From stored images to what the network is fed, a batch at a time on the device."""

    def __init__(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
        require((mean is None) == (std is None), "mean and std must be given together")
        if mean is not None and std is not None:
            require(len(mean) == len(std), "mean and std must have the same length")
            require(all(s > 0 for s in std), "std must be positive")
        self.mean, self.std = mean, std
        self._scales: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        if self.mean is None:
            return images
        require(
            images.ndim == 4 and len(self.mean) in (1, images.shape[1]),
            f"mean has {len(self.mean)} channels, the images are {tuple(images.shape)}",
        )
        mean, std = self._scale(images)
        return (images - mean) / std

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation on the device, put there once: a transfer makes the host wait."""
        if like.device not in self._scales:
            mean, std = (like.new_tensor(v).view(1, -1, 1, 1) for v in (self.mean, self.std))
            self._scales[like.device] = (mean, std)
        return self._scales[like.device]


def augment_batch(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random crops out of zero-padded images, half of them mirrored, in one gather."""
    if images.ndim != 4:
        raise LbylError(
            f"augmentation needs images (N, C, H, W), not {tuple(images.shape)}: give augment=False"
        )
    n, _, height, width = images.shape
    pad_y, pad_x = height // 8, width // 8
    device = images.device
    draw = {"generator": generator, "device": device}
    top = torch.randint(0, 2 * pad_y + 1, (n, 1), **draw)  # type: ignore[call-overload]
    left = torch.randint(0, 2 * pad_x + 1, (n, 1), **draw)  # type: ignore[call-overload]
    mirrored = torch.rand((n, 1), generator=generator, device=device) < 0.5
    rows = top + torch.arange(height, device=device)  # (n, height)
    columns = torch.arange(width, device=device)
    columns = left + torch.where(mirrored, width - 1 - columns, columns)  # (n, width)
    padded = F.pad(images, (pad_x, pad_x, pad_y, pad_y)).permute(0, 2, 3, 1)
    which = torch.arange(n, device=device).view(n, 1, 1)
    cropped = padded[which, rows[:, :, None], columns[:, None, :]]  # (n, height, width, c)
    return cropped.permute(0, 3, 1, 2).contiguous()


def check_labels(data: Dataset[Any], classes: int, name: str) -> None:
    """Refuse wrong labels before any work where they can be seen all at once."""
    if not isinstance(data, Pair):
        return
    if data.labels.ndim == 1:
        check_range(data.labels, classes, name)
        return
    columns, sums = data.labels.shape[1], data.labels.sum(1)
    require(
        columns == classes,
        f"{name}: probabilities of {columns} classes, but the model has {classes} classes",
    )
    fine = bool((data.labels >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())
    require(fine, f"{name}: the probabilities of an image must add up to 1")


def check_range(labels: Tensor, classes: int, name: str) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise LbylError(
            f"{name}: labels run from {low} to {high}, but the model has {classes} classes "
            f"(labels 0 to {classes - 1})"
        )
