"""Where rules are registered and applied, and what all of them use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lbyl.graph.declare import Rule, leaf_rule
from lbyl.runtime.session import one_thread
from lbyl.tracing.labels import Flow
from lbyl.tracing.record import Call, Ref

RULES: dict[str, Rule] = {}
"""The rule of every torch function that has one, by the function's bare name."""

STRICT = False
"""Whether a rule that raises is an error, as in tests, instead of an opaque function."""


class RuleError(RuntimeError):
    """A rule raised on a call (only where `STRICT`)."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the torch functions of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


TURNS = ("T", "mT", "t", "transpose")


@one_thread()
def propagate(flow: Flow) -> Flow:
    """Follow every call of the record; afterwards the flow holds all ties and pins."""
    read = {value for call in flow.record.calls for value in call.inputs}
    read.update(flow.record.outputs, flow.record.unrecorded)
    for call in flow.record.calls:
        if call.op in TURNS and read.isdisjoint(call.outputs):
            for value in call.outputs:  # `x @ weight.T` is recorded as the layer that it is
                flow.labels[value] = flow.fixed(value)
            continue
        for value, labels in zip(call.outputs, _output_labels(flow, call)):
            flow.give(value, labels)
        _account(flow, call)
    flow.pin_all(flow.record.outputs, "it reaches the model's output")
    flow.pin_all(flow.record.unrecorded, "it is used by code that cannot be followed")
    flow.pin_all(flow.record.wrapped, "it is used inside torch.func (vmap, grad)")
    return flow


def _output_labels(flow: Flow, call: Call) -> Sequence[Tensor]:
    """The labels of a call's outputs by its rule, or as of an opaque function."""
    if not call.trusted:
        return opaque(flow, call, "reads memory changed in place through another view")
    channel_rule = leaf_rule(call.leaf) if call.leaf is not None else RULES.get(call.op)
    if channel_rule is None:
        return opaque(flow, call)
    try:
        labels = channel_rule(flow, call)
    except Exception as error:
        if STRICT:
            raise RuleError(f"the rule of {call.op} in {call.module!r} raised: {error}") from error
        # A use of the function that its rule does not foresee. Ties made so far only bind more.
        return opaque(flow, call, "is called in a way that has no channel rule")
    if len(labels) != len(call.outputs) or any(
        x.shape != flow.shape(v) for x, v in zip(labels, call.outputs)
    ):
        return opaque(flow, call)
    return labels


def _account(flow: Flow, call: Call) -> None:
    """Matrices used other than as a layer's weight stay whole; constants make constants."""
    parameters = flow.record.parameters
    for value in call.inputs:
        if value not in parameters or (id(call), value) in flow.accounted:
            continue
        if sum(size > 1 for size in flow.shape(value)) > 1:
            flow.pin_all([value], f"its weight is also used by {call.op} in {call.module}")
    if all(v in parameters or v in flow.constants for v in call.inputs):
        flow.constants.update(call.outputs)


def opaque(flow: Flow, call: Call, why: str = "has no channel rule") -> list[Tensor]:
    """Pin all that enters, for the reason that the function `why`; what comes out is fixed."""
    within = f" in {call.module}" if call.module else ""
    if any(flow.marked(v) or v in flow.record.parameters for v in call.inputs):
        flow.pin_all(call.inputs, f"it enters {call.op}{within}, which {why}")
    return fixed_outputs(flow, call)


def fixed_outputs(flow: Flow, call: Call) -> list[Tensor]:
    """Labels that say no output of a call carries channels."""
    return [flow.fixed(value) for value in call.outputs]


# torch also takes numpy's names.
_ALIASES = {"dim": ("axis",), "input": ("x", "a", "x1"), "other": ("x2",)}


def argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name, under any name that torch takes for it."""
    if len(call.args) > position:
        return call.args[position]
    given = [n for n in (name, *_ALIASES.get(name, ())) if n in call.kwargs]
    return call.kwargs[given[0]] if given else default


def input_of(call: Call) -> int:
    """The value that a function works on: its argument `input`, or its first tensor."""
    value = value_of(argument(call, 0, "input"))
    return call.inputs[0] if value is None else value


def value_of(x: Any) -> int | None:
    """The value number of a tensor argument, None for anything else."""
    return x.value if isinstance(x, Ref) else None
