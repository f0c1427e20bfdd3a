"""One run of a network → its graph of units."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lbyl.errors import LbylError
from lbyl.graph.patterns import listed, matches, names_attention
from lbyl.graph.unit import Graph, Unit
from lbyl.runtime.garbage import young_objects_only
from lbyl.runtime.guest import SCRIPTED, Guest
from lbyl.runtime.run import Examples, Inputs
from lbyl.runtime.tensors import is_finite, numbers, tensors
from lbyl.surgery.modules.experts import alignments, split_experts
from lbyl.tracing.attention.heads import offer
from lbyl.tracing.dry_run import verify
from lbyl.tracing.follow import follow
from lbyl.tracing.group import Grouping, build, without

Patterns = str | Sequence[str]
AS_WEIGHTS = ("running_mean", "running_var", "weight", "bias")  # buffers that are computed with
NOT_INCLUDED, EXCLUDED = "not in include=", "excluded as asked"  # reasons that a user gave


def trace(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    include: Patterns = "*",
    exclude: Patterns = (),
    residual: bool = False,
) -> Graph:
    """Find the channels of `model` that can be pruned, and what each touches.

    `include` and `exclude` are shell-style patterns of layer names: a unit is offered when all the
    layers that make its channels fit `include` and no layer that would lose channels fits
    `exclude`. `residual` also offers channels that additions tie across layers.
    """
    return guest_and_graph(
        model, example_inputs, include=include, exclude=exclude, residual=residual
    )[1]


@young_objects_only()
def guest_and_graph(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    include: Patterns,
    exclude: Patterns,
    residual: bool,
) -> tuple[Guest, Graph]:
    """What runs in place of `model`, with its experts apart, and its graph."""
    check_model(model)
    example_inputs = Examples.of(example_inputs)
    guest = Guest.of(model, example_inputs, split_experts)
    with guest.at_work():
        return guest, _traced(guest.model, example_inputs, include, exclude, residual)


def _traced(
    model: nn.Module, example_inputs: Inputs, include: Patterns, exclude: Patterns, residual: bool
) -> Graph:
    """The graph of a network that may be run."""
    flow = follow(model, example_inputs, residual=residual)
    known = Grouping.of(flow)
    graph = build(known, residual)
    whole = graph.units if residual else known.units(known.accepted(residual=True)[0])
    unprunable = {**packed(model), **graph.unprunable}
    batch = _batch(example_inputs)
    graph = replace(graph, batch=batch, all_units=whole, unprunable=unprunable)
    graph = _aligned(graph, alignments(model))
    ordinary = [p for p in listed(include) if not names_attention(p)]
    graph = select(graph, ordinary, [p for p in listed(exclude) if not names_attention(p)])
    graph = verify(model, example_inputs, graph, flow.record, residual)
    if any(names_attention(p) for p in listed(include)):
        graph = offer(model, example_inputs, flow, graph, include)
        graph = without(graph, {u.name: EXCLUDED for u in graph if matches(u.name, exclude)})
    return graph


def _aligned(graph: Graph, needed: Mapping[str, int]) -> Graph:
    """The graph whose units keep multiples that the kernels of their parameters need."""
    axes = graph.axes_of if needed else {}

    def multiple(unit: Unit) -> int:
        return math.lcm(*(needed.get(name, 1) for name, _ in axes.get(unit.name, ())))

    return replace(graph, units=tuple(replace(u, multiple=multiple(u)) for u in graph.units))


def check_model(model: nn.Module) -> None:
    """One clear error for weights no method can work with."""
    if not isinstance(model, nn.Module):
        raise LbylError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise LbylError(SCRIPTED)
    used: dict[str, Tensor] = {}
    for name, tensor in tensors(model).items():
        if nn.parameter.is_lazy(tensor):
            raise LbylError(f"{name} is uninitialised: run the model once before compressing it")
        as_weight = isinstance(tensor, nn.Parameter) or name.rpartition(".")[2] in AS_WEIGHTS
        if as_weight and (tensor.is_floating_point() or tensor.is_complex()):
            used[name] = tensor
    if not is_finite(*used.values()):
        name = next(name for name, tensor in used.items() if not is_finite(tensor))
        raise LbylError(f"{name} holds NaN or Inf: load weights that are finite before compressing")
    variances: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        variance, eps = getattr(module, "running_var", None), getattr(module, "eps", None)
        if isinstance(variance, Tensor) and isinstance(eps, (int, float)) and variance.numel():
            variances[name] = variance.min() + eps
    bad = [name for name, least in zip(variances, numbers([*variances.values()])) if least <= 0]
    if bad:
        raise LbylError(
            f"{bad[0]}.running_var plus eps is not positive everywhere, so {bad[0]} gives no "
            "numbers: load running statistics that belong to the weights, or raise its eps"
        )


def packed(model: nn.Module) -> dict[str, str]:
    """Layers whose weights are no tensors, as quantised ones, with that reason."""
    return {
        name: "its weights are packed (quantised): prune before quantising"
        for name, module in model.named_modules()
        if inspect.ismethod(getattr(module, "weight", None))
    }


def _batch(example_inputs: Inputs) -> int:
    tensors = [x for x in tree_flatten(example_inputs)[0] if isinstance(x, Tensor)]
    return max(1, int(tensors[0].shape[0])) if tensors and tensors[0].dim() else 1


def select(graph: Graph, include: Patterns, exclude: Patterns) -> Graph:
    """The graph with only the units asked for; the others become unprunable and say why."""
    _check_patterns(graph, include, exclude)
    dropped: dict[str, str] = {}
    for unit in graph.units:
        if not all(matches(p.name, include) for p in unit.producers):
            dropped[unit.name] = NOT_INCLUDED
        elif any(matches(name, exclude) for name in _layers_cut(unit)):
            dropped[unit.name] = EXCLUDED
    return without(graph, dropped)


def _layers_cut(unit: Unit) -> list[str]:
    """Every layer that loses channels of its own when the unit is pruned."""
    return [*(p.name for p in unit.producers), *unit.between]


def _check_patterns(graph: Graph, include: Patterns, exclude: Patterns) -> None:
    """One clear error for a pattern that no layer fits: a typo would protect nothing."""
    known = dict.fromkeys(name for unit in graph.units for name in _layers_cut(unit))
    known |= dict.fromkeys([*graph.unprunable, *graph.consumers, *(x.name for x in graph.layers)])
    for keyword, patterns in (("include", include), ("exclude", exclude)):
        for pattern in listed(patterns):
            if not isinstance(pattern, str):
                raise LbylError(f"{keyword}= takes patterns of layer names, not {pattern!r}")
            if pattern == "*" or any(matches(name, pattern) for name in known):
                continue
            near = difflib.get_close_matches(pattern, [*known, *_stems(known)], 3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see print(graph)"
            raise LbylError(f"{keyword}={pattern!r} fits no layer of this network; {hint}")


def _stems(names: dict[str, None]) -> list[str]:
    """Patterns for everything inside a module: `layer1.*`."""
    return list(dict.fromkeys(f"{n.rpartition('.')[0]}.*" for n in names if "." in n))
