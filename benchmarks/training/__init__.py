"""Fine-tuning and training from scratch.

What the design must satisfy:

* everything random in an epoch follows from ``(seed, epoch)`` alone, so that a run that was
  interrupted goes on exactly as if it had not been;
* one body of code for a laptop, a GPU and several processes: Accelerate places, wraps and reduces;
* a checkpoint is three files that no one has to trust: two of tensors, one of JSON.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from benchmarks.training.checkpoint import Store
from benchmarks.training.config import (
    PRECISIONS,
    SCHEDULES,
    History,
    TrainConfig,
    learning_rate_at,
    require,
)
from benchmarks.training.data import Data, Preparation, as_dataset, augment_batch, check_labels
from benchmarks.training.session import Session, open_session
from lbyl.errors import LbylError

__all__ = [
    "PRECISIONS",
    "SCHEDULES",
    "Data",
    "History",
    "TrainConfig",
    "augment_batch",
    "learning_rate_at",
    "train",
]


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

    Data are torch Datasets of ``(image, label)`` or pairs ``(images NCHW, labels)``; a pair that
    lies on the training device is never copied. Labels of a pair to learn from may also be class
    probabilities, as another network gives them. ``uint8`` images are divided by 255, others are
    taken as they are; then ``mean`` and ``std`` apply, if given. With ``out``, a checkpoint is kept
    there and ``resume=True`` goes on from it. The model ends in evaluation mode on the device it
    came from. Started by ``accelerate launch`` or ``torchrun``, the processes share each batch and
    the main one writes.
    """
    config = config or TrainConfig()
    data = as_dataset(train_data, "training data", soft=True)
    held_out = None if eval_data is None else as_dataset(eval_data, "evaluation data")
    store = Store.at(out, resume)
    home = next((p.device for p in model.parameters()), None)
    require(home is not None, "the model has no parameters to train")
    with open_session(model, data, config, Preparation(mean, std), cpu, workers) as session:
        check_labels(data, session.classes, "training data")
        if held_out is not None:
            check_labels(held_out, session.classes, "evaluation data")
        history = store.restore(session) if resume else History()
        _run_epochs(session, held_out, history, store, progress)
    model.to(home)
    model.eval()
    return history


def _run_epochs(
    session: Session, held_out: Dataset[Any] | None, history: History, store: Store, shown: bool
) -> None:
    config = session.config
    with _progress(shown and session.accelerator.is_main_process, history) as tick:
        for epoch in range(len(history), config.epochs):
            started = time.perf_counter()
            loss = session.train_epoch(epoch, tick)
            if not math.isfinite(loss):
                raise LbylError(
                    f"the training loss became {loss} in epoch {epoch + 1}: lower the learning "
                    "rate, or set gradient_clip"
                )
            last = epoch + 1 == config.epochs
            judged = last or (epoch + 1) % config.eval_every == 0
            accuracy = session.accuracy(held_out) if judged and held_out is not None else None
            rate = learning_rate_at(config, epoch * session.steps, session.steps)
            row = {"epoch": epoch + 1, "learning_rate": rate, "train_loss": loss}
            seconds = round(time.perf_counter() - started, 3)
            history.append({**row, "eval_accuracy": accuracy, "seconds": seconds})
            if (epoch + 1) % config.checkpoint_every == 0 or last:
                store.save(session, history)


@contextmanager
def _progress(shown: bool, history: History) -> Iterator[Any]:
    """A function to call after each step, drawing a bar where one is wanted."""

    def losses() -> str:
        return f", loss {history[-1]['train_loss']:.4f}" if history else ""

    if not shown:
        yield lambda *_: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("training", total=None)

        def tick(epoch: int, epochs: int, step: int, steps: int) -> None:
            label = f"epoch {epoch + 1}/{epochs}{losses()}"
            bar.update(
                task, description=label, total=epochs * steps, completed=epoch * steps + step
            )

        yield tick
