"""Record a run and follow its channels call by call, layers of training included."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lbyl.surgery.cut import weightless_copy
from lbyl.torchkit.forms import Forms
from lbyl.torchkit.run import Inputs
from lbyl.torchkit.tensors import tensors
from lbyl.tracing.labels import Flow
from lbyl.tracing.record import DoesNotRun, Ran, Record, record
from lbyl.tracing.rules import propagate


def follow(
    model: nn.Module,
    inputs: Inputs,
    on: Ran | None = None,
    spare: bool = False,
    grouped: Collection[str] = (),
    training: bool = True,
    before: Record | None = None,
    residual: bool = False,
    forms: Forms | None = None,
) -> Flow:
    """Record a run and follow its channels; with `training` layers that only training runs too.

    `residual` follows them through norms over channels and into tables of embeddings.
    """
    run = record(model, inputs, on, spare, before=before, forms=forms)
    flow = propagate(Flow(run, grouped=set(grouped), residual=residual))
    if training and flow.record.ran != "real":
        own = {name for name, tensor in tensors(model).items() if isinstance(tensor, nn.Parameter)}
        silent = own - set(flow.record.parameters.values())
        if silent:
            _heed_training(flow, model, inputs, silent)
    return flow


def _heed_training(flow: Flow, model: nn.Module, inputs: Inputs, silent: set[str]) -> None:
    """Pin the channels read by a layer that runs in training only, such as an auxiliary head.

    Its parameters took no part in evaluation, so a cut would leave them at the old size.
    """
    try:
        run = record(
            weightless_copy(model, {}, filled=False),
            inputs,
            flow.record.ran,
            spare=True,
            training=True,
            forms=flow.record.forms,
        )
    except DoesNotRun as error:  # training asks for more than these inputs: heeded up to there
        run = error.record
    if not run.failed and not silent & set(run.parameters.values()):
        return  # training runs them no more than evaluation does
    aside = propagate(Flow(run, flow.atoms, grouped=flow.grouped, residual=flow.residual))
    names = [run.parameters.get(value) for value in run.failed]
    aside.pin_all(run.failed if silent & set(names) else [], "it is read in training only")
    for layer in aside.layers:
        if layer.weight in silent:
            flow.refused[layer.name] = "it runs in training only"
            axis = flow.atoms.axes.get((layer.weight, layer.input_axis))
            if axis is not None:
                flow.atoms.pin(axis, f"it is read by {layer.name}, which runs in training only")
