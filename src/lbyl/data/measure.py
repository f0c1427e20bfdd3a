"""Top-1 accuracy of a network on an image set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lbyl.data.imageset import ImageSet
from lbyl.exceptions import LbylError
from lbyl.zoo import NetworkInfo
from lbyl.zoo import info as network_info

Progress = Callable[[int, int], None]  # (images done, images in all)


def accuracy(
    model: nn.Module,
    data: ImageSet,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 250,
    device: str | torch.device | None = None,
    limit: int | None = None,
    flatten: bool = False,
    progress: Progress | None = None,
) -> float:
    """Percentage of images (the first ``limit``) whose largest logit is that of their label.

    The model runs in evaluation mode on ``device`` (where it already is unless said otherwise)
    and is given back in the mode and on the device it was. ``flatten`` for networks that read
    vectors.
    """
    if data.labels is None:
        raise LbylError(f"{data.name} has no labels, so there is no accuracy to measure")
    if not len(data):
        raise LbylError(f"{data.name} holds no images")
    total = len(data) if limit is None else min(limit, len(data))
    right = done = 0
    with torch.inference_mode(), _evaluating(model, device) as place:
        for images, labels in data.batches(batch_size, mean, std, place, limit):
            assert labels is not None  # checked above
            logits = model(images.flatten(1) if flatten else images)
            if not done:
                _check_classes(logits, data)
            right += int((logits.argmax(1) == labels).sum())
            done += len(labels)
            if progress is not None:
                progress(done, total)
    return 100.0 * right / done


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
    shape = data.image_shape
    wanted = info.input_shape
    if (math.prod(shape),) != wanted if info.flatten else shape != wanted:
        hint = "" if info.flatten else f" (load them with size={wanted[-1]}?)"
        raise LbylError(f"{data.name}: images are {shape} but {info.name} reads {wanted}{hint}")
    return accuracy(
        model, data, info.mean, info.std, batch_size, device, limit, info.flatten, progress
    )


@contextmanager
def _evaluating(
    model: nn.Module, device: str | torch.device | None
) -> Iterator[str | torch.device]:
    """Evaluation mode on a device; afterwards every module has its own mode and place again."""
    tensor = next(model.parameters(), None)
    home = torch.device("cpu") if tensor is None else tensor.device
    place = home if device is None else torch.device(device)
    modes = [(module, module.training) for module in model.modules()]
    try:
        if place != home:
            model.to(place)
        model.eval()
        yield place
    finally:
        for module, mode in modes:
            module.training = mode
        if place != home:
            model.to(home)


def _check_classes(logits: Tensor, data: ImageSet) -> None:
    """Refuse labels that cannot be about these logits.

    Without class names, labels reaching less far than the logits may just be few images; but
    where that many images of all classes would all but never miss the last ones (one chance in a
    thousand million), they belong to another data set.
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
