"""Accuracy of a network on an image set, with how far chance may have moved it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.app.data.imageset import ImageSet
from lbyl.app.sources.zoo import NetworkInfo
from lbyl.app.sources.zoo import info as network_info
from lbyl.errors import LbylError
from lbyl.runtime.run import device_of, evaluation_mode
from lbyl.runtime.session import own_randomness

FEW_CLASSES = 10  # among which being one of five says little
Progress = Callable[[int, int], None]  # (images seen, images in all)


@dataclass(frozen=True)
class Score:
    """How many images a network took for what they are."""

    images: int
    correct: int
    within_5: int | None  # whose label is among the five largest; None with ten classes or fewer

    @property
    def accuracy(self) -> float:
        """In per cent."""
        return 100.0 * self.correct / self.images

    @property
    def top_5(self) -> float | None:
        return None if self.within_5 is None else 100.0 * self.within_5 / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """Where the accuracy on all images of this kind lies in 19 cases of 20 (Wilson)."""
        n, p, z = self.images, self.correct / self.images, 1.96
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)


def score(
    model: nn.Module,
    data: ImageSet,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 250,
    device: str | torch.device | None = None,
    limit: int | None = None,
    flatten: bool = False,
    progress: Progress | None = None,
) -> Score:
    """Answers of a network to images (the first ``limit``), counted.

    The model runs in evaluation mode on ``device`` (default: where it is); its modes and its
    device are restored afterwards. ``flatten`` is for networks that read vectors.
    """
    if data.labels is None:
        raise LbylError(f"{data.name} has no labels, so there is no accuracy to measure")
    if not len(data):
        raise LbylError(f"{data.name} holds no images")
    total = len(data) if limit is None else min(limit, len(data))
    correct = within = seen = classes = 0
    # Moved outside of inference mode, inside of which parameters would become inference tensors.
    moved = _moved(model, device)
    with moved as target, own_randomness(), evaluation_mode(model), torch.inference_mode():
        for images, labels in data.batches(batch_size, mean, std, target, limit):
            assert labels is not None  # checked above
            logits = model(images.flatten(1) if flatten else images)
            if not seen:
                _check_classes(logits, data)
                classes = logits.shape[1]
            correct += int((logits.argmax(1) == labels).sum())
            best = logits.topk(min(5, classes), 1).indices
            within += int((best == labels[:, None]).any(1).sum())
            seen += len(labels)
            if progress is not None:
                progress(seen, total)
    return Score(seen, correct, within if classes > FEW_CLASSES else None)


def accuracy(model: nn.Module, data: ImageSet, *args: Any, **kwargs: Any) -> float:
    """Percentage of images whose largest logit is that of their label; arguments as of `score`."""
    return score(model, data, *args, **kwargs).accuracy


def evaluate(
    network: str | NetworkInfo,
    model: nn.Module,
    data: ImageSet,
    batch_size: int = 250,
    device: str | torch.device | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> float:
    """:func:`accuracy` with the normalisation and input shape of a registered network."""
    info = network_info(network) if isinstance(network, str) else network
    shape, expected = data.image_shape, info.input_shape
    if (math.prod(shape),) != expected if info.flatten else shape != expected:
        hint = "" if info.flatten else f" (load them with size={expected[-1]}?)"
        raise LbylError(f"{data.name}: images are {shape} but {info.name} reads {expected}{hint}")
    return accuracy(
        model, data, info.mean, info.std, batch_size, device, limit, info.flatten, progress
    )


@contextmanager
def _moved(model: nn.Module, device: str | torch.device | None) -> Iterator[torch.device]:
    """The model on `device` inside (None: where it is), back on its own device afterwards."""
    original = device_of(model)
    target = original if device is None else torch.device(device)
    try:
        if target != original:
            model.to(target)
        yield target
    finally:
        if target != original:
            model.to(original)


def _check_classes(logits: Tensor, data: ImageSet) -> None:
    """Refuse labels of another data set than the logits.

    Without class names, labels reaching less far than the logits may just be few images; but
    where that many images drawn from all classes would miss the last ones with a probability
    below 1e-9, they belong to another data set.
    """
    if logits.ndim != 2:
        raise LbylError(f"the model gives shape {tuple(logits.shape)}, not (images, classes)")
    outputs, classes = logits.shape[1], data.class_count
    assert classes is not None  # only labelled sets come here
    too_few = classes < outputs and data.total * math.log(classes / outputs) < math.log(1e-9)
    named = data.classes is not None and classes != outputs
    if named or classes > outputs or too_few:
        raise LbylError(
            f"{data.name} has labels of {classes} classes but the model tells {outputs} apart: "
            "these labels are not of the data set the model was trained for"
        )
