"""A user's own unlabelled inputs as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lbyl.errors import LbylError
from lbyl.inputs.batches import InputBatches
from lbyl.torchkit.run import Inputs, device_of


def own_batches(model: nn.Module, loader: Iterable[Any]) -> InputBatches:
    """A user's own unlabelled inputs; labels that come along are ignored."""
    device = device_of(model)
    if isinstance(loader, Tensor):
        loader = list(loader.split(256))
    batches = list(_unlabelled(loader, device))
    if not batches:
        raise LbylError("data= gave no batch: pass a tensor, or an iterable of batches")
    return InputBatches(batches, len(batches), False, "own")


def _unlabelled(loader: Iterable[Any], device: torch.device) -> Iterator[Inputs]:
    for batch in loader:
        inputs: Any = batch
        if isinstance(batch, (list, tuple)) and batch:
            inputs = batch[0]  # (images, labels), as loaders of labelled data give
        if not isinstance(inputs, (Tensor, Mapping)):
            raise LbylError(
                f"batches of data= must be tensors, dicts or (inputs, labels), not "
                f"{type(inputs).__name__}"
            )
        inputs = tree_map_only(Tensor, lambda x: x.to(device), inputs)
        yield inputs
