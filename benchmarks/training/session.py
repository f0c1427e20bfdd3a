"""The model as Accelerate wraps it, and one epoch of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from benchmarks.training.config import TrainConfig, learning_rate_at, require
from benchmarks.training.data import (
    Batches,
    Preparation,
    augment_batch,
    epoch_order,
    length,
    read_batches,
    seed_of,
    training_batches,
)
from lbyl.errors import LbylError


@dataclass
class Session:
    accelerator: Any
    bare: nn.Module  # the user's own model
    wrapped: nn.Module  # the same behind whatever several processes need
    optimizer: Any
    data: Dataset[Any]
    config: TrainConfig
    prepare: Preparation
    workers: int
    steps: int = field(init=False)
    classes: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = len(self._batches(0))
        with self._seeded(0):
            image = default_collate([self.data[0][0]]).to(self.accelerator.device)
            self.bare.eval()
            with torch.no_grad():
                logits = _logits(self.bare(self.prepare(image)))
        require(logits.ndim == 2, f"the model gives {tuple(logits.shape)}, not (N, classes)")
        self.classes = logits.shape[1]

    def _batches(self, epoch: int) -> Batches:
        order = epoch_order(length(self.data), self.config, epoch)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return training_batches(order, self.config.batch_size, rank, world)

    @contextmanager
    def _seeded(self, epoch: int) -> Iterator[torch.Generator]:
        """Seed what dropout and datasets draw from, and give the caller's own stream back after."""
        device: torch.device = self.accelerator.device
        seed = seed_of(self.config.seed, 2, epoch, self.accelerator.process_index)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield torch.Generator(device).manual_seed(seed)

    def _load(self, data: Dataset[Any], batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
        device: torch.device = self.accelerator.device
        return read_batches(data, batches, device, self.workers, self.classes)

    def train_epoch(self, epoch: int, tick: Any) -> float:
        """One pass over the training data; the mean loss over all processes."""
        self.wrapped.train()
        batches = self._batches(epoch)
        # Nothing in this loop may ask the device for a value: the host would wait at each step.
        losses = torch.zeros((), device=self.accelerator.device)
        with self._seeded(epoch) as generator:
            for index, (images, labels) in enumerate(self._load(self.data, batches)):
                if self.config.augment:
                    images = augment_batch(images, generator)
                loss = self._step(images, labels, epoch * self.steps + index)
                losses += loss * len(labels)
                tick(epoch, self.config.epochs, index + 1, len(batches))
        self._agree_on_buffers()
        seen = losses.new_tensor(sum(len(batch) for batch in batches))
        total = self.accelerator.reduce(torch.stack([losses, seen]), reduction="sum")
        return float(total[0] / total[1])

    def _step(self, images: Tensor, labels: Tensor, step: int) -> Tensor:
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(config, step, self.steps)
        logits = _logits(self.wrapped(self.prepare(images)))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        if config.gradient_clip is not None:
            self.accelerator.clip_grad_norm_(self.wrapped.parameters(), config.gradient_clip)
        self.optimizer.step()
        return loss.detach().float()

    def _agree_on_buffers(self) -> None:
        """BatchNorm's running values differ between processes after a step: the first's count."""
        if self.accelerator.num_processes == 1:
            return
        for buffer in self.bare.buffers():
            torch.distributed.broadcast(buffer, src=0)

    def accuracy(self, data: Dataset[Any]) -> float:
        """The fraction of ``data`` classified rightly, each process judging its share."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        share = torch.arange(rank, length(data), world)
        size = self.config.eval_batch_size or self.config.batch_size
        batches = [share[i : i + size].tolist() for i in range(0, len(share), size)]
        right = torch.zeros((), device=self.accelerator.device)
        self.bare.eval()
        with torch.no_grad(), self._seeded(0):
            for images, labels in self._load(data, batches):
                right += (_logits(self.bare(self.prepare(images))).argmax(1) == labels).sum()
        judged = right.new_tensor(len(share))
        total = self.accelerator.reduce(torch.stack([right, judged]), reduction="sum")
        return float(total[0] / total[1])


@contextmanager
def open_session(
    model: nn.Module,
    data: Dataset[Any],
    config: TrainConfig,
    prepare: Preparation,
    cpu: bool,
    workers: int,
) -> Iterator[Session]:
    accelerator = _accelerator(config, cpu)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )
    own_forward = model.__dict__.get("forward")
    try:
        wrapped, prepared = accelerator.prepare(model, optimizer)
        yield Session(accelerator, model, wrapped, prepared, data, config, prepare, workers)
    finally:
        # Accelerate marks the instance and may wrap its forward; the user gets it back as it was,
        # and a later call prepares it afresh.
        for name in ("_is_accelerate_prepared", "_original_forward", "forward"):
            model.__dict__.pop(name, None)
        if own_forward is not None:
            model.__dict__["forward"] = own_forward


def _accelerator(config: TrainConfig, cpu: bool) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise LbylError("training needs Accelerate: pip install 'lbyl[train]'") from error
    if config.mixed_precision == "fp16" and (cpu or not torch.cuda.is_available()):
        raise LbylError("mixed_precision='fp16' needs a GPU; use 'bf16' or 'no' here")
    options = {"mixed_precision": config.mixed_precision, "cpu": cpu}
    try:
        return Accelerator(**options)
    except ValueError:
        # Accelerate keeps the first precision and device of a process for good; a second call
        # with other ones is legitimate here, since nothing of the first is in use any more.
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(**options)


def _logits(output: Any) -> Tensor:
    """Networks answer with a tensor, or with an object that holds one as ``logits``."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise LbylError(f"the model gives {type(output).__name__}, not a tensor of class scores")
    return logits
