"""Fine-tuning and training from scratch.

What the design must satisfy:

* everything random in an epoch follows from ``(seed, epoch)`` alone, so that a run that was
  interrupted goes on exactly as if it had not been;
* one body of code for a laptop, a GPU and several processes: Accelerate places, wraps and reduces;
* a checkpoint is three files that no one has to trust: two of tensors, one of JSON.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from lbyl.exceptions import LbylError

SCHEDULES = ("cosine", "step", "constant")
PRECISIONS = ("no", "fp16", "bf16")
STATE_VERSION = 1

Data = Any  # a torch Dataset of (image, label), or a pair of (images, labels) tensors


@dataclass(frozen=True)
class TrainConfig:
    """Every choice that changes what is learned; the defaults are for fine-tuning."""

    epochs: int = 20
    batch_size: int = 128  # over all processes together
    learning_rate: float = 0.01
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)  # fractions of the run, for "step"
    factor: float = 0.2  # what the rate is multiplied by at each milestone
    warmup_epochs: float = 0
    mixed_precision: str = "no"
    seed: int = 0
    augment: bool = True
    label_smoothing: float = 0.0
    gradient_clip: float | None = None
    limit: int | None = None  # at most so many training images, drawn at random
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        _require(self.schedule in SCHEDULES, f"schedule {self.schedule!r} is none of {SCHEDULES}")
        _require(
            self.mixed_precision in PRECISIONS,
            f"mixed_precision {self.mixed_precision!r} is none of {PRECISIONS}",
        )
        for name in ("epochs", "batch_size", "checkpoint_every"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        _require(self.limit is None or self.limit >= 1, "limit must be at least 1, or None")
        _require(self.learning_rate > 0, "learning_rate must be positive")
        _require(0 <= self.momentum < 1, "momentum must lie in [0, 1)")
        _require(self.momentum > 0 or not self.nesterov, "nesterov needs a momentum above 0")
        _require(self.weight_decay >= 0, "weight_decay must not be negative")
        _require(0 <= self.label_smoothing < 1, "label_smoothing must lie in [0, 1)")
        _require(
            0 <= self.warmup_epochs <= self.epochs, "warmup_epochs must lie between 0 and epochs"
        )
        _require(
            self.gradient_clip is None or self.gradient_clip > 0,
            "gradient_clip must be positive, or None",
        )


class History(list[dict[str, Any]]):
    """One dict an epoch: epoch, learning_rate, train_loss, eval_accuracy, seconds."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {"epochs": [dict(row) for row in self]}


def train(
    model: nn.Module,
    train_data: Data,
    eval_data: Data | None = None,
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    cpu: bool = False,
    workers: int = 0,
) -> History:
    """Train ``model`` in place with SGD and say how each epoch went.

    Data are torch Datasets of ``(image, label)`` or pairs ``(images NCHW, labels)``. ``uint8``
    images are divided by 255, others are taken as they are; then ``mean`` and ``std`` apply, if
    given. With ``out``, a checkpoint is kept there and ``resume=True`` goes on from it. The model
    ends in evaluation mode on the device it came from. Started by ``accelerate launch`` or
    ``torchrun``, the processes share each batch and the main one writes.
    """
    config = config or TrainConfig()
    data = _as_dataset(train_data, "training data")
    held_out = None if eval_data is None else _as_dataset(eval_data, "evaluation data")
    store = _Store.at(out, resume)
    home = next((p.device for p in model.parameters()), None)
    _require(home is not None, "the model has no parameters to train")
    with _session(model, data, config, _Preparation.of(mean, std), cpu, workers) as session:
        session.check_labels(data, "training data")
        if held_out is not None:
            session.check_labels(held_out, "evaluation data")
        history = store.restore(session) if resume else History()
        _run_epochs(session, held_out, history, store, progress)
    model.to(home)
    model.eval()
    return history


def _run_epochs(
    session: _Session, held_out: Dataset[Any] | None, history: History, store: _Store, shown: bool
) -> None:
    config = session.config
    with _progress(shown and session.accelerator.is_main_process) as tick:
        for epoch in range(len(history), config.epochs):
            started = time.perf_counter()
            loss = session.train_epoch(epoch, tick)
            if not math.isfinite(loss):
                raise LbylError(
                    f"the training loss became {loss} in epoch {epoch + 1}: lower the learning "
                    "rate, or set gradient_clip"
                )
            accuracy = None if held_out is None else session.accuracy(held_out)
            rate = learning_rate_at(config, epoch * session.steps, session.steps)
            row = {"epoch": epoch + 1, "learning_rate": rate, "train_loss": loss}
            seconds = round(time.perf_counter() - started, 3)
            history.append({**row, "eval_accuracy": accuracy, "seconds": seconds})
            if (epoch + 1) % config.checkpoint_every == 0 or epoch + 1 == config.epochs:
                store.save(session, history)


def learning_rate_at(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of optimiser step ``step`` (from 0): a formula, so that it needs no saved state."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.learning_rate * min(1.0, (step + 1) / warmup)
    total = config.epochs * steps_per_epoch
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "step":
        # The small allowance keeps 0.3 * 10 from missing the milestone by a rounding error.
        passed = sum(step + 1e-9 >= milestone * total for milestone in config.milestones)
        return float(config.learning_rate * config.factor**passed)
    done = (step - warmup) / max(1.0, total - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


# ---------------------------------------------------------------------------------------------
# Data: what is fed, in which order, in what form


class _Pair(Dataset[Any]):
    """Two tensors side by side, read a whole batch at a time."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


def _collate(batch: Any) -> tuple[Tensor, Tensor]:
    """A pair comes as a batch already; the items of another dataset still have to be stacked."""
    if isinstance(batch, tuple):
        return cast("tuple[Tensor, Tensor]", batch)
    images, labels = default_collate(batch)
    return images, labels


def _as_dataset(data: Data, name: str) -> Dataset[Any]:
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape"):
        images, labels = torch.as_tensor(data[0]), torch.as_tensor(data[1])
        _require(
            len(images) == len(labels), f"{name}: {len(images)} images but {len(labels)} labels"
        )
        _require(
            labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex(),
            f"{name}: labels must be one whole number an image, not {labels.dtype} "
            f"of shape {tuple(labels.shape)}",
        )
        dataset: Dataset[Any] = _Pair(images, labels.long())
    else:
        dataset = data
    _require(
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"),
        f"{name}: expected a dataset with a length, or a pair (images, labels), "
        f"not {type(data).__name__}",
    )
    _require(_length(dataset) > 0, f"{name} is empty")
    return dataset


def _length(dataset: Dataset[Any]) -> int:
    return len(cast("Sequence[Any]", dataset))


def _seed(*parts: int) -> int:
    """One seed out of several numbers, with none of the collisions of adding them up."""
    return int(np.random.SeedSequence([part % 2**32 for part in parts]).generate_state(1)[0])


def _epoch_order(count: int, config: TrainConfig, epoch: int) -> Tensor:
    """The images of one epoch, shuffled by the seed and the epoch and by nothing else."""
    generator = torch.Generator().manual_seed(_seed(config.seed, 0))
    order = torch.arange(count)
    if config.limit is not None and config.limit < count:
        order = torch.randperm(count, generator=generator)[: config.limit]
    generator.manual_seed(_seed(config.seed, 1, epoch))
    return order[torch.randperm(len(order), generator=generator)]


def _training_batches(order: Tensor, size: int, rank: int, world: int) -> list[list[int]]:
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


@dataclass(frozen=True)
class _Preparation:
    """From stored images to what the network is fed, a batch at a time on the device."""

    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @classmethod
    def of(cls, mean: Sequence[float] | None, std: Sequence[float] | None) -> _Preparation:
        _require((mean is None) == (std is None), "mean and std must be given together")
        if mean is None or std is None:
            return cls(None, None)
        _require(len(mean) == len(std), "mean and std must have the same length")
        _require(all(s > 0 for s in std), "std must be positive")
        return cls(tuple(mean), tuple(std))

    def __call__(self, images: Tensor) -> Tensor:
        images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        if self.mean is None or self.std is None:
            return images
        _require(
            images.ndim == 4 and len(self.mean) in (1, images.shape[1]),
            f"mean has {len(self.mean)} channels, the images are {tuple(images.shape)}",
        )
        mean = images.new_tensor(self.mean).view(1, -1, 1, 1)
        return (images - mean) / images.new_tensor(self.std).view(1, -1, 1, 1)


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


# ---------------------------------------------------------------------------------------------
# A session: the model as Accelerate wraps it, and one epoch of work


@dataclass
class _Session:
    accelerator: Any
    bare: nn.Module  # the user's own model
    wrapped: nn.Module  # the same behind whatever several processes need
    optimizer: Any
    data: Dataset[Any]
    config: TrainConfig
    prepare: _Preparation
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
        _require(logits.ndim == 2, f"the model gives {tuple(logits.shape)}, not (N, classes)")
        self.classes = logits.shape[1]

    def _batches(self, epoch: int) -> list[list[int]]:
        order = _epoch_order(_length(self.data), self.config, epoch)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return _training_batches(order, self.config.batch_size, rank, world)

    @contextmanager
    def _seeded(self, epoch: int) -> Iterator[torch.Generator]:
        """Seed what dropout and datasets draw from, and give the caller's own stream back after."""
        device: torch.device = self.accelerator.device
        seed = _seed(self.config.seed, 2, epoch, self.accelerator.process_index)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield torch.Generator(device).manual_seed(seed)

    def _load(
        self, data: Dataset[Any], batches: list[list[int]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        device: torch.device = self.accelerator.device
        loader: DataLoader[Any] = DataLoader(
            data,
            batch_sampler=batches,
            collate_fn=_collate,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
        )
        for images, labels in loader:
            _check_range(labels, self.classes, "the data")
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def check_labels(self, data: Dataset[Any], name: str) -> None:
        """Refuse wrong labels before any work where they can be seen all at once."""
        if isinstance(data, _Pair):
            _check_range(data.labels, self.classes, name)

    def train_epoch(self, epoch: int, tick: Any) -> float:
        """One pass over the training data; the mean loss over all processes."""
        self.wrapped.train()
        batches = self._batches(epoch)
        total = torch.zeros(2, device=self.accelerator.device)  # sum of losses, images
        with self._seeded(epoch) as generator:
            for index, (images, labels) in enumerate(self._load(self.data, batches)):
                if self.config.augment:
                    images = augment_batch(images, generator)
                loss = self._step(images, labels, epoch * self.steps + index)
                total += torch.stack([loss * len(labels), loss.new_tensor(len(labels))])
                tick(epoch, self.config.epochs, index + 1, len(batches))
        self._agree_on_buffers()
        total = self.accelerator.reduce(total, reduction="sum")
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
        share = torch.arange(rank, _length(data), world)
        size = self.config.batch_size
        batches = [share[i : i + size].tolist() for i in range(0, len(share), size)]
        total = torch.zeros(2, device=self.accelerator.device, dtype=torch.float64)
        self.bare.eval()
        with torch.no_grad(), self._seeded(0):
            for images, labels in self._load(data, batches):
                right = _logits(self.bare(self.prepare(images))).argmax(1) == labels
                total += torch.stack([right.sum(), torch.full_like(right.sum(), len(labels))])
        total = self.accelerator.reduce(total, reduction="sum")
        return float(total[0] / total[1])


@contextmanager
def _session(
    model: nn.Module,
    data: Dataset[Any],
    config: TrainConfig,
    prepare: _Preparation,
    cpu: bool,
    workers: int,
) -> Iterator[_Session]:
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
        yield _Session(accelerator, model, wrapped, prepared, data, config, prepare, workers)
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


def _check_range(labels: Tensor, classes: int, name: str) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise LbylError(
            f"{name}: labels run from {low} to {high}, but the model has {classes} classes "
            f"(labels 0 to {classes - 1})"
        )


@contextmanager
def _progress(shown: bool) -> Iterator[Any]:
    """A function to call after each step, drawing a bar where one is wanted."""
    if not shown:
        yield lambda *_: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("training", total=None)

        def tick(epoch: int, epochs: int, step: int, steps: int) -> None:
            label = f"epoch {epoch + 1}/{epochs}"
            bar.update(
                task, description=label, total=epochs * steps, completed=epoch * steps + step
            )

        yield tick


# ---------------------------------------------------------------------------------------------
# Checkpoints


_UNREADABLE = (
    OSError,
    KeyError,
    TypeError,
    RuntimeError,
    SafetensorError,
    json.JSONDecodeError,
    UnicodeDecodeError,
)


@dataclass(frozen=True)
class _Store:
    """A folder with one checkpoint in it, ``checkpoint-<epoch>``, replaced by the next."""

    folder: Path | None

    @classmethod
    def at(cls, out: str | Path | None, resume: bool) -> _Store:
        store = cls(None if out is None else Path(out))
        latest = store.latest()
        if resume and latest is None:
            raise LbylError(f"nothing to resume: there is no checkpoint in {out}")
        if not resume and latest is not None:
            raise LbylError(
                f"{latest} is there already: give resume=True to go on from it, or another folder"
            )
        return store

    def latest(self) -> Path | None:
        if self.folder is None:
            return None
        found = sorted(self.folder.glob("checkpoint-*/state.json"))
        return found[-1].parent if found else None

    def save(self, session: _Session, history: History) -> None:
        """Write the files aside and rename the folder, so that no half checkpoint is ever seen."""
        if self.folder is None:
            return
        if session.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / ".writing"
            shutil.rmtree(aside, ignore_errors=True)  # what an interrupted run left behind
            aside.mkdir()
            save_model(session.bare, str(aside / "model.safetensors"))
            save_file(_momenta(session), aside / "optimizer.safetensors")
            state = json.dumps(_state(session, history), indent=2)
            (aside / "state.json").write_text(state, encoding="utf-8")
            target = self.folder / f"checkpoint-{len(history):06d}"
            aside.replace(target)
            for old in self.folder.glob("checkpoint-*"):
                if old != target:
                    shutil.rmtree(old)
        session.accelerator.wait_for_everyone()

    def restore(self, session: _Session) -> History:
        """Put weights, momentum and history back as they were after the saved epoch."""
        folder = self.latest()
        assert folder is not None  # `at` has looked
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            history = History(state["history"])
            _check_same_run(state, _state(session, history))
            load_model(session.bare, folder / "model.safetensors")
            momenta = load_file(folder / "optimizer.safetensors")
        except _UNREADABLE as error:
            raise LbylError(f"{folder} cannot be resumed with this model: {error}") from error
        for name, parameter in session.bare.named_parameters():
            if name in momenta:
                buffer = momenta[name].to(parameter.device)
                session.optimizer.optimizer.state[parameter]["momentum_buffer"] = buffer
        if session.accelerator.scaler is not None and state["scaler"]:
            session.accelerator.scaler.load_state_dict(state["scaler"])
        return history


def _momenta(session: _Session) -> dict[str, Tensor]:
    state = session.optimizer.optimizer.state
    buffers = {n: state[p].get("momentum_buffer") for n, p in session.bare.named_parameters()}
    return {name: buffer.contiguous() for name, buffer in buffers.items() if buffer is not None}


def _state(session: _Session, history: History) -> dict[str, Any]:
    scaler = session.accelerator.scaler
    return {
        "version": STATE_VERSION,
        "epoch": len(history),
        "step": len(history) * session.steps,
        "seed": session.config.seed,
        "images": _length(session.data),
        "config": asdict(session.config),
        "scaler": None if scaler is None else scaler.state_dict(),
        "history": list(history),
    }


def _check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """A schedule and an order continued under other settings would be neither run."""
    now = json.loads(json.dumps(now))  # tuples as lists, as they come back from the file
    before, after = ({**s["config"], "images": s["images"]} for s in (saved, now))
    changed = [
        f"{key} was {before.get(key)}, is {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key != "checkpoint_every"
    ]
    _require(saved["version"] == STATE_VERSION, f"checkpoint version {saved['version']} is unknown")
    _require(not changed, "cannot resume a run with another setting: " + "; ".join(changed))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LbylError(message)
