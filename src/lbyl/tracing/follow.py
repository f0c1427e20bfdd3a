"""Record a run and follow its channels call by call, layers of training included."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import CodeType

from torch import nn

from lbyl.surgery.cut import copy_model
from lbyl.torchkit.run import Inputs
from lbyl.torchkit.tensors import tensors
from lbyl.tracing.labels import Flow
from lbyl.tracing.record import DoesNotRun, Record, record
from lbyl.tracing.rules import propagate


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
        own = {name for name, tensor in tensors(model).items() if isinstance(tensor, nn.Parameter)}
        silent = own - set(flow.record.parameters.values())
        if silent:
            silent -= _heed_training(flow, model, inputs, silent)
        _heed_unreached(flow, model, silent)
    return flow


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


def _heed_unreached(flow: Flow, model: nn.Module, silent: set[str]) -> None:
    """Pin the channels that a layer could read which no run has reached, as of another task.

    Code can only hand it what it sees itself: the values in the code of the innermost module
    around the layer that has run, and those that modules keep. Of those the ones whose width fits
    the layer, and all of them where none fits and the code names the layer: it would be handed
    something made of them.
    """
    frames, state = flow.record.frames, tensors(model)
    inside = {name.rpartition(".")[0] for name in silent}
    entered: set[str] = set()  # modules that no run has entered, by their outermost
    kept = flow.record.kept
    seen = {frame: _widths(flow, values | kept) for frame, values in frames.items() if silent}
    for name, tensor in state.items():
        owner = name.rpartition(".")[0]
        if name not in silent and (owner not in inside or owner in frames):
            continue
        frame = _frame_around(owner, frames)
        widths = seen[frame]
        others = set().union(*widths.values())
        meets = [v for v, own in widths.items() if _fits(own, tensor.shape, others)]
        vector = sum(size > 1 for size in tensor.shape) < 2
        if owner in frames and vector:  # as a token in the place of masked ones
            flow.unreached += [name] * bool(meets)
            continue
        outermost = name if owner in frames else _below(frame, owner)
        if not meets and not vector and outermost not in entered and _is_named(model, outermost):
            meets = list(widths)
        if not vector:
            entered.add(outermost)
        for value in meets:
            flow.atoms.pin(
                flow.of(value),
                f"it could be read by {name}, which the example does not reach: give an example "
                "for each path",
            )


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


def _widths(flow: Flow, values: Collection[int]) -> dict[int, set[int]]:
    """For each value that carries channels the sizes of the dimensions along which it does."""
    found = {
        value: {flow.shape(value)[d] for d in flow.dims(value)} - {1}
        for value in values
        if value not in flow.record.parameters
    }
    return {value: widths for value, widths in found.items() if widths}
