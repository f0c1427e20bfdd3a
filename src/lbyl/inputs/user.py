"""A user's own unlabelled inputs as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.inputs.batches import LEAST_BATCH, InputBatches
from lbyl.inputs.examples import part_of, regrouped, rows_in, some_rows
from lbyl.runtime.format import first_line
from lbyl.runtime.run import Inputs, call_model, device_of, evaluation_mode

TOKENS = 2048  # of a batch
HELD_OUT = 4  # every so manieth of a user's own inputs is kept for comparing networks,
FEWEST_HELD, MOST_HELD = 32, 512  # if that makes so many: fewer tell less than data-free ones
COMPARED_AT_ONCE = 64
FEWEST_NORMALISING = 32  # own inputs from which BatchNorm takes its moments rather from them


@dataclass(frozen=True)
class OwnInputs:
    """A user's own inputs by what they are for."""

    fitted: InputBatches  # statistics are collected and steps taken on these
    held: InputBatches | None  # networks are compared on these; None: there would be too few

    @classmethod
    def of(cls, inputs: InputBatches, whole: bool = False) -> OwnInputs:
        """Every fourth example is held out; `whole`: every fourth batch, which is not taken apart.

        A network looks better on what it was fitted to than it is, and the more so the fewer inputs
        there are: with fewer than channels, every width looks free.
        """
        batches = list(inputs.batches)
        sizes = [rows_in(batch) for batch in batches]
        if whole or None in sizes:
            fitted, held = _whole_apart(batches, sizes)
        else:
            fitted, held = _rows_apart(batches, [size or 0 for size in sizes])
        if examples_in(held) < FEWEST_HELD:
            return cls(inputs, None)
        held = held if whole else regrouped(held, COMPARED_AT_ONCE)
        return cls(_with(inputs, fitted), _with(inputs, held))

    def normalising(self, most: int, whole: bool = False) -> InputBatches | None:
        """About `most` of those fitted on, for BatchNorm to normalise by; None: there are few."""
        most = max(most, FEWEST_NORMALISING)
        batches: list[Inputs] = []
        for batch in self.fitted.batches:
            if examples_in(batches) < most:
                batches.append(batch)
        if not whole:
            joined = regrouped(batches, most)
            batches = [part_of(batch, 0, most, rows_in(batch)) for batch in joined]
        batches = [batch for batch in batches if (rows_in(batch) or 0) >= LEAST_BATCH]
        if examples_in(batches) < FEWEST_NORMALISING:
            return None
        return replace(_with(self.fitted, batches), batch_statistics=True)


def examples_in(batches: Iterable[Inputs]) -> int:
    """How many there are; a batch that does not tell is one."""
    return sum(rows_in(batch) or 1 for batch in batches)


def halves(inputs: InputBatches, whole: bool = False) -> tuple[list[Inputs], list[Inputs]]:
    """Every second example, and the others; `whole`: every second batch, none taken apart.

    Where there is one batch only that cannot be taken apart it is both.
    """
    batches = list(inputs.batches)
    sizes = [rows_in(batch) for batch in batches]
    if whole or None in sizes:
        return batches[::2], batches[1::2] or batches
    parts: tuple[list[Inputs], list[Inputs]] = [], []
    for batch, size in zip(batches, sizes):
        for first, part in enumerate(parts):
            rows = torch.arange(first, size or 0, 2)
            part.extend([some_rows(batch, rows, size or 0)] if len(rows) else [])
    return parts


def _with(inputs: InputBatches, batches: list[Inputs]) -> InputBatches:
    return replace(inputs, batches=batches, count=len(batches))


def _whole_apart(
    batches: list[Inputs], sizes: list[int | None]
) -> tuple[list[Inputs], list[Inputs]]:
    most = max(1, MOST_HELD // max(size or 1 for size in sizes))
    taken = range(HELD_OUT - 1, len(batches), HELD_OUT)[:most]
    held = [batches[i] for i in taken]
    return [batch for i, batch in enumerate(batches) if i not in taken], held


def _rows_apart(batches: list[Inputs], sizes: list[int]) -> tuple[list[Inputs], list[Inputs]]:
    """The last ones of every batch: what comes in order, such as classes, is in both parts."""
    step = max(HELD_OUT, -(-sum(sizes) // MOST_HELD))
    fitted: list[Inputs] = []
    held: list[Inputs] = []
    seen = 0
    for batch, size in zip(batches, sizes):
        taken = (seen + size) // step - seen // step
        seen += size
        if taken < size:
            fitted.append(part_of(batch, 0, size - taken, size))
        if taken:
            held.append(part_of(batch, size - taken, taken, size))
    return fitted, held


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
