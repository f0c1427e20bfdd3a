"""A compact training loop for detectors: minutes on a GPU, a smoke test on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.detection.batched import default_boxes, ssd_losses
from benchmarks.detection.coco import Target
from benchmarks.detection.packed import PackedImages
from lbyl.errors import LbylError

Batch = tuple[list[Tensor], list[Target]]


def train_detector(
    model: nn.Module,
    dataset: Dataset[Any] | PackedImages,
    epochs: int = 30,
    lr: float = 0.05,
    device: str | torch.device = "cpu",
    bf16: bool = False,
    *,
    batch_size: int = 32,
    optimizer: str = "sgd",
    weight_decay: float | None = None,
    warmup_steps: int = 200,
    gradient_clip: float = 10.0,
    flip: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> list[dict[str, float]]:
    """Train a torchvision-style detector in place on items (uint8 image, target).

    SGD or AdamW ("adamw", better from scratch in few steps; its rates are some 25 times lower)
    with a warm-up and a cosine; mirrored images for augmentation. Gives one row an epoch: epoch,
    loss, seconds. The model stays on ``device``, in evaluation mode. An SSD given
    :class:`PackedImages` learns from whole batches, many times faster on a GPU.
    """
    count = len(cast("list[Any]", dataset))
    if count == 0 or epochs < 1 or batch_size < 1:
        raise LbylError("training needs at least one image, one epoch and a batch of one")
    target = torch.device(device)
    # Tensor cores read channels last; every batch would be turned over otherwise.
    layout = torch.channels_last if target.type == "cuda" else torch.contiguous_format
    model.to(target).to(memory_format=layout)
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepper = _optimizer(optimizer, parameters, lr, weight_decay)
    losses = _losses(model, dataset, target, bf16, batch_size, flip)
    steps = math.ceil(count / batch_size)
    warmup = min(warmup_steps, epochs * steps // 5)
    rows: list[dict[str, float]] = []
    for epoch in range(epochs):
        started = time.perf_counter()
        model.train()
        total = torch.zeros((), device=target)
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        for step, loss in enumerate(losses(generator)):
            now = epoch * steps + step
            stepper.param_groups[0]["lr"] = lr * _rate(now, warmup, epochs * steps)
            stepper.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, gradient_clip)
            stepper.step()
            total += loss.detach()
        rows.append(_row(epoch, float(total) / steps, time.perf_counter() - started, progress))
    model.to(memory_format=torch.contiguous_format).eval()
    return rows


def _optimizer(
    name: str, parameters: list[nn.Parameter], lr: float, decay: float | None
) -> torch.optim.Optimizer:
    if name == "sgd":
        decay = 5e-4 if decay is None else decay
        return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True, weight_decay=decay)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=0.05 if decay is None else decay)
    raise LbylError(f"optimizer {name!r} is neither 'sgd' nor 'adamw'")


def _losses(
    model: nn.Module,
    dataset: Dataset[Any] | PackedImages,
    device: torch.device,
    bf16: bool,
    batch_size: int,
    flip: bool,
) -> Callable[[torch.Generator], Iterator[Tensor]]:
    """An epoch's losses, batch by batch, for the random numbers given."""
    if not isinstance(dataset, PackedImages):
        count = len(cast("list[Any]", dataset))

        def by_item(generator: torch.Generator) -> Iterator[Tensor]:
            for batch in _batches(dataset, count, batch_size, generator, flip):
                yield _loss(model, batch, device, bf16)

        return by_item
    packed, anchors = dataset.to(device), default_boxes(model, dataset.size)

    def by_batch(generator: torch.Generator) -> Iterator[Tensor]:
        for batch in packed.shuffled(batch_size, generator, flip):
            losses = ssd_losses(model, *batch, anchors, bf16=bf16)
            yield torch.stack(list(losses.values())).sum()

    return by_batch


def _row(epoch: int, loss: float, seconds: float, shown: bool) -> dict[str, float]:
    if not math.isfinite(loss):
        raise LbylError(f"the loss became {loss} in epoch {epoch + 1}: lower lr")
    if shown:
        print(f"epoch {epoch + 1}: loss {loss:.4f}, {seconds:.1f} s", flush=True)
    return {"epoch": epoch + 1, "loss": loss, "seconds": round(seconds, 3)}


def _rate(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _loss(model: nn.Module, batch: Batch, device: torch.device, bf16: bool) -> Tensor:
    images = [image.to(device, non_blocking=True).float() / 255 for image in batch[0]]
    targets = [{key: value.to(device) for key, value in target.items()} for target in batch[1]]
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        losses = model(images, targets)
    return torch.stack([value.float() for value in losses.values()]).sum()


def _batches(
    dataset: Dataset[Any], count: int, size: int, generator: torch.Generator, flip: bool
) -> Iterator[Batch]:
    order = torch.randperm(count, generator=generator).tolist()
    for start in range(0, count, size):
        items = [dataset[index] for index in order[start : start + size]]
        mirrored = torch.rand(len(items), generator=generator).tolist()
        items = [_mirror(*item) if flip and p < 0.5 else item for item, p in zip(items, mirrored)]
        yield [image for image, _ in items], [target for _, target in items]


def _mirror(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    boxes = target["boxes"].clone()
    boxes[:, [0, 2]] = image.shape[-1] - target["boxes"][:, [2, 0]]
    return image.flip(-1), {**target, "boxes": boxes}
