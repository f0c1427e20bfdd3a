"""A user's own unlabelled inputs as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.inputs.batches import InputBatches
from lbyl.torchkit.format import first_line
from lbyl.torchkit.run import Inputs, call_model, device_of, evaluation_mode

TOKENS = 2048  # of a batch


def own_batches(model: nn.Module, loader: Iterable[Any]) -> InputBatches:
    """A user's own unlabelled inputs; labels that come along are ignored."""
    device = device_of(model)
    if isinstance(loader, Tensor):
        loader = list(loader.split(_rows_at_once(loader)))
    batches = list(_unlabelled(loader, device))
    if not batches:
        raise LbylError("data= gave no batch: pass a tensor, or an iterable of batches")
    return InputBatches(batches, len(batches), False, "own")


@torch.no_grad()
def check_runs(model: nn.Module, inputs: InputBatches, example: Inputs) -> None:
    """One clear error for inputs that the network does not take."""
    batch = next(iter(inputs.batches))
    try:
        with evaluation_mode(model):
            call_model(model, batch)
    except Exception as error:  # whatever torch, or the network itself, complains of
        there, here = _described(batch), _described(example)
        raise LbylError(
            f"the network does not take the inputs of data=, {there}; the example inputs are "
            f"{here} ({first_line(error)})"
        ) from error


def _described(inputs: Inputs) -> str:
    leaves = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]
    return " and ".join(f"{tuple(x.shape)} of {x.dtype}" for x in leaves[:3]) or "no tensor"


def _rows_at_once(loader: Tensor) -> int:
    """Examples of a batch; of tokens, each of which has as many scores as there are words, few."""
    if loader.dim() == 2 and not loader.dtype.is_floating_point:
        return max(1, TOKENS // loader.shape[1])
    return 256


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
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)  # what tokenisers give is a mapping of its own kind
        inputs = tree_map_only(Tensor, lambda x: x.to(device), inputs)
        yield inputs
