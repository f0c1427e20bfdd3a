"""Record a run and follow its channels call by call, layers of training included."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

import torch
from torch import Tensor, nn

from lbyl.runtime.run import Inputs
from lbyl.runtime.tensors import tensors
from lbyl.surgery.cut import copy_model
from lbyl.surgery.layout import whole_numbers
from lbyl.tracing.labels import Flow, constant_dropped, distinct
from lbyl.tracing.record import DoesNotRun, Record, record
from lbyl.tracing.rules import propagate
from lbyl.tracing.values import LEAVES


def follow(
    model: nn.Module,
    inputs: Inputs,
    spare: bool = False,
    grouped: Collection[str] = (),
    training: bool = True,
    before: Record | None = None,
    residual: bool = False,
) -> Flow:
    """Record a run and follow its channels; with `training` layers that only training runs too.

    `residual` follows them through norms over channels and into tables of embeddings.
    """
    run = record(model, inputs, spare, before=before)
    flow = propagate(Flow(run, grouped=set(grouped), residual=residual))
    if training:
        unread = _unread(flow, model)
        if unread:
            unread -= _heed_training(flow, model, inputs, unread)
        _heed_unreached(flow, model, unread)
        _heed_unused(flow)
    return flow


def _unread(flow: Flow, model: nn.Module) -> set[str]:
    """Parameters that no call has read, and buffers that another path would compute with.

    Those are the numbers of modules that have not run, and vectors of those in which values decide
    what runs: others that nothing reads are mostly masks and scales of another mode.
    """
    record = flow.record
    read = set(record.parameters.values())
    deciding = _deciding(record)

    def counts(name: str, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return isinstance(tensor, nn.Parameter)
        owner = name.rpartition(".")[0]
        return owner not in record.frames or (owner in deciding and _is_vector(tensor.shape))

    return {name for name, x in tensors(model).items() if name not in read and counts(name, x)}


def _deciding(record: Record) -> set[str]:
    """Modules in whose code values become numbers of Python, which decide what runs."""
    return {call.module for call in record.calls if call.op in LEAVES}


def _is_vector(sizes: Sequence[int]) -> bool:
    return sum(size > 1 for size in sizes) < 2


def _heed_training(flow: Flow, model: nn.Module, inputs: Inputs, silent: set[str]) -> set[str]:
    """Pin the channels read by a layer that runs in training only, such as an auxiliary head.

    Its parameters took no part in evaluation, so a cut would leave them at the old size. Returned
    are the parameters that training reaches. Training may write anything, so that its network
    shares neither weights nor buffers.
    """
    try:
        run = record(copy_model(model), inputs, spare=True, training=True)
    except DoesNotRun as error:  # training asks for more than these inputs: heeded up to there
        run = error.record
    reached = silent & set(run.parameters.values())
    if not run.failed and not reached:
        return reached  # training runs them no more than evaluation does
    aside = propagate(Flow(run, flow.atoms, grouped=flow.grouped, residual=flow.residual))
    names = [run.parameters.get(value) for value in run.failed]
    aside.pin_all(run.failed if silent & set(names) else [], "it is read in training only")
    for layer in aside.layers:
        if layer.weight in silent:
            flow.refused[layer.name] = "it runs in training only"
            axis = flow.atoms.axes.get((layer.weight, layer.input_axis))
            if axis is not None:
                flow.atoms.pin(axis, f"it is read by {layer.name}, which runs in training only")
    return reached


def _heed_unreached(flow: Flow, model: nn.Module, unread: set[str]) -> None:
    """Pin the channels that a layer could read which no run has reached, as of another task.

    Code can only hand it what it sees itself: the values in the code of the innermost module
    around the layer that has run, and those that modules keep. Of those the ones whose width fits
    the layer, and all of them where none explains it and the code names the layer: it would be
    handed something made of them.
    """
    frames = flow.record.frames
    values_decide = bool(_deciding(flow.record))
    entered: set[str] = set()  # modules that no run has entered, by their outermost
    seen: dict[str, _Frame] = {}
    for name, owner, sizes in _unreached(model, unread, frames):
        around = _frame_around(owner, frames)
        if around not in seen:
            seen[around] = _Frame.of(flow, frames[around] | flow.record.kept)
        frame = seen[around]
        read = _read(model.get_submodule(owner), sizes)
        meets = frame.fitting(sizes, read)
        vector = _is_vector(sizes)
        # As a token in the place of masked ones, which a caller asks for and no value.
        if owner in frames and vector and not values_decide:
            flow.unreached += [name] * bool(meets)
            continue
        outermost = name if owner in frames else _below(around, owner)
        if not vector and outermost not in entered:
            entered.add(outermost)
            if not frame.explains(meets, read) and _is_named(model, outermost):
                meets = list(frame.widths)
        for value in meets:
            flow.atoms.pin(
                flow.of(value),
                f"it could be read by {name}, which the example does not reach: give an example "
                "for each path",
            )


def _heed_unused(flow: Flow) -> None:
    """Pin the channels in whose place others could stand that were made and not read.

    Where values decide what runs, code may make both of two branches and go on with one. With an
    example for each they are the same channels.
    """
    record = flow.record
    deciding = sorted(_deciding(record))
    classes = flow.atoms.classes() if deciding else torch.empty(0)
    for module in deciding:
        widths = _Frame.of(flow, record.frames[module]).widths
        made = {v: distinct(classes[constant_dropped(flow.of(v))]) for v in widths}
        unused = [v for v in widths if v not in flow.users and v not in record.outputs]
        for value, own in widths.items():
            alike = [v for v in unused if not own.isdisjoint(widths[v])]
            if any(not torch.equal(made[v], made[value]) for v in alike):
                where = module or "the network"
                flow.atoms.pin(
                    flow.of(value),
                    f"values decide in {where} whether others stand in its place: give an example "
                    "for each path",
                )


def _read(module: nn.Module, sizes: Sequence[int]) -> set[int]:
    """How many channels a layer with weights of these sizes reads, as far as it tells."""
    asked = (getattr(module, key, None) for key in ("in_features", "in_channels"))
    return {n for value in asked for n in whole_numbers(value)} or set(sizes[:2])


NORMED = ("normalized_shape", "num_channels")  # what norms call their widths


def _unreached(
    model: nn.Module, unread: set[str], frames: Collection[str]
) -> Iterator[tuple[str, str, Sequence[int]]]:
    """Name, module and sizes of what no run has reached.

    Those are tensors, with what lies beside them in modules that have not run, and norms that have
    none but insist on a width.
    """
    inside = {name.rpartition(".")[0] for name in unread} - set(frames)
    for name, tensor in tensors(model).items():
        owner = name.rpartition(".")[0]
        if name in unread or owner in inside:
            yield name, owner, tensor.shape
    for name, module in model.named_modules():
        held = [*module._parameters.values(), *module._buffers.values()]
        if name not in frames and all(x is None for x in held):
            widths = [n for key in NORMED for n in whole_numbers(getattr(module, key, None))]
            if widths:
                yield name, name, widths


def _frame_around(module: str, frames: Collection[str]) -> str:
    """The innermost module around one, or itself, that has run."""
    while module not in frames:
        module = module.rpartition(".")[0]
    return module


def _below(frame: str, module: str) -> str:
    """The part of a module that another, around it, holds itself."""
    rest = module.removeprefix(f"{frame}.") if frame else module
    return f"{frame}.{rest.partition('.')[0]}"


def _is_named(model: nn.Module, part: str) -> bool:
    """Whether the code of a module names this part of it; what only `__init__` names is left over.

    Code that lies elsewhere than in the module's class is not looked at.
    """
    parent, _, name = part.rpartition(".")
    kinds = type(model.get_submodule(parent)).__mro__
    own = [f for kind in kinds if kind is not nn.Module for f in vars(kind).items()]
    waiting = [getattr(f, "__code__", None) for key, f in own if key != "__init__"]
    for code in waiting:  # which grows meanwhile
        if code is not None and (name in code.co_names or name in code.co_consts):
            return True
        waiting += [c for c in getattr(code, "co_consts", ()) if isinstance(c, CodeType)]
    # A list is gone through as a whole.
    return name.isdigit() or any(hasattr(f, "__wrapped__") for _, f in own)


SPLIT = 4  # parts at most that channels are taken to be split into on the way to a layer


@dataclass(frozen=True)
class _Frame:
    """What the code of a module could hand to a layer: values, by the sizes along channels."""

    widths: dict[int, set[int]]  # of values that carry channels
    beside: dict[int, set[int]]  # of each of them how wide values are that could be joined to it
    outputs: set[int]  # of the network

    @classmethod
    def of(cls, flow: Flow, values: Collection[int]) -> _Frame:
        values = [v for v in values if v not in flow.record.parameters]
        widths = {v: {flow.shape(v)[d] for d in flow.dims(v)} - {1} for v in values}
        second, last = (
            {flow.shape(v)[d] for v in values if len(flow.shape(v)) > 1} for d in (1, -1)
        )
        beside = {
            v: (second if 1 in flow.dims(v) else set())
            | (last if len(flow.shape(v)) - 1 in flow.dims(v) else set())
            for v in values
        }
        return cls({v: own for v, own in widths.items() if own}, beside, set(flow.record.outputs))

    def fitting(self, sizes: Sequence[int], read: Collection[int]) -> list[int]:
        """The values that a layer of these sizes, which reads so many channels, could be handed.

        What carries none, as the input, is only thought of where no value has so many.
        """
        whole = any(not own.isdisjoint(read) for own in self.widths.values())
        several = set().union(*self.widths.values())
        return [
            v
            for v, own in self.widths.items()
            if _fits(own, sizes, several)
            or (not whole and _joins(own, read, several | self.beside[v]))
        ]

    def explains(self, meets: Sequence[int], read: Collection[int]) -> bool:
        """Whether a layer that reads so many channels could be handed any of these values.

        What the network gives fits a part of a width by accident, for it often is a few classes.
        """
        return any(v not in self.outputs or not self.widths[v].isdisjoint(read) for v in meets)


def _joins(own: Collection[int], read: Collection[int], others: Collection[int]) -> bool:
    """Whether channels that come in these widths, beside one or two others, are so many."""
    left = {n - width for n in read for width in own}
    return any(n in others or any(n - other in others for other in others) for n in left)


def _fits(own: Collection[int], sizes: Sequence[int], others: Collection[int]) -> bool:
    """Whether a parameter of these sizes could read or join channels that come in these widths.

    As they are, flattened or several times side by side, a part of them, or beside those of
    another value, which has one of the `others` widths.
    """
    read = sizes[1:]
    return any(
        any(size % width == 0 or size - width in others for size in sizes)
        or any(width % size == 0 and width <= SPLIT * size for size in read)
        for width in own
    )
