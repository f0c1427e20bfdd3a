"""The choices of a training run, the rate at each step, and the record of its epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lbyl.errors import LbylError

SCHEDULES = ("cosine", "step", "constant")
PRECISIONS = ("no", "fp16", "bf16")


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
    eval_every: int = 1  # the last epoch is always judged
    eval_batch_size: int | None = None  # as large as a training batch unless said otherwise

    def __post_init__(self) -> None:
        require(self.schedule in SCHEDULES, f"schedule {self.schedule!r} is none of {SCHEDULES}")
        require(
            self.mixed_precision in PRECISIONS,
            f"mixed_precision {self.mixed_precision!r} is none of {PRECISIONS}",
        )
        for name in ("epochs", "batch_size", "checkpoint_every", "eval_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        require(
            self.eval_batch_size is None or self.eval_batch_size >= 1,
            "eval_batch_size must be at least 1, or None",
        )
        require(self.limit is None or self.limit >= 1, "limit must be at least 1, or None")
        require(self.learning_rate > 0, "learning_rate must be positive")
        require(0 <= self.momentum < 1, "momentum must lie in [0, 1)")
        require(self.momentum > 0 or not self.nesterov, "nesterov needs a momentum above 0")
        require(self.weight_decay >= 0, "weight_decay must not be negative")
        require(0 <= self.label_smoothing < 1, "label_smoothing must lie in [0, 1)")
        require(
            0 <= self.warmup_epochs <= self.epochs, "warmup_epochs must lie between 0 and epochs"
        )
        require(
            self.gradient_clip is None or self.gradient_clip > 0,
            "gradient_clip must be positive, or None",
        )


class History(list[dict[str, Any]]):
    """One dict an epoch: epoch, learning_rate, train_loss, eval_accuracy or None, seconds."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {"epochs": [dict(row) for row in self]}


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


def require(condition: bool, message: str) -> None:
    if not condition:
        raise LbylError(message)
