"""What must hold for every network, checked on the one of a seed."""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import lbyl
from support.fuzz.architectures import Drawn, draw, reset
from support.networks import fingerprint
from support.reference import distance, flat

EXACT = 1e-7  # relative, in float64: some networks divide by what nearly cancels
IMAGES = 12
RATIOS = (0.25, 0.5, 0.75)
NONE = lbyl.methods.Prune()


class Broken(AssertionError):
    """A promise that does not hold; the message says which."""


@dataclass(frozen=True)
class Kept:
    """What was seen of one network that keeps all promises."""

    units: int
    method: str | None = None  # None where nothing can be pruned
    elements: tuple[str, ...] = ()  # what was drawn, and what was asked for


# What a caller is told instead of a smaller network, and rightly so.
SAID = ("nothing in this model can be pruned", "cannot be met by pruning alone")
SAID += ("cannot be met: the closest network",)


def check(seed: int, without: Collection[str] = ()) -> Kept:
    """Every promise on the network of this seed; raises `Broken`, or what the library raises."""
    rng, asked = random.Random(f"promises {seed}"), random.Random(f"asked {seed}")
    drawn = draw(seed, without)
    model = drawn.model
    _mark(seed, model)
    residual = rng.random() < 0.4
    elements = [*drawn.elements, *["asked residual"] * residual]
    include = _included(asked, elements)
    with unchanged(model, attributes="buffers" not in without):
        graph = _traced(drawn, residual, include)
        if not graph.units:
            _require(bool(graph.unprunable), "a reason for every layer: there is none")
            return Kept(0, None, tuple(elements))
        prepared = lbyl.Prepared(model, drawn.inputs, graph, IMAGES)
        options: dict[str, Any] = {"method": rng.choice(lbyl.methods.names())}
        method = lbyl.methods.resolve(options["method"])
        if not method.chooses:
            options["criterion"] = rng.choice(["l1", "l2", "l2-gm", "random"])
        amount, name = _amount(asked, {"*": rng.choice(RATIOS)})
        elements += [name, f"method {method.name}"]
        try:
            restored = prepared.compress(amount, **options)
        except lbyl.LbylError as error:
            if not any(said in str(error) for said in SAID):
                raise
            return Kept(0, None, (*elements, "said that it cannot be done"))
        graph = restored.graph
        apart = prepared.model  # with experts that are layers of their own
        cut = prepared.compress(restored.plan, method=NONE).model
        whole = prepared.compress(_whole(graph), method=NONE).model
    _check_identity(drawn, whole)
    _check_silenced(apart, drawn, restored, cut)
    _check_sizes(restored)
    _check_budget(model, restored, amount)
    _check_restored(drawn, prepared, restored, method)
    _check_reloads(drawn, restored, seed, without)
    return Kept(len(restored.plan.pruned), method.name, tuple(elements))


def _traced(drawn: Drawn, residual: bool, include: list[str]) -> lbyl.Graph:
    try:
        return lbyl.trace(drawn.model, drawn.inputs, residual=residual, include=include)
    except lbyl.LbylError as error:
        if "fits no attention" not in str(error):
            raise
        return lbyl.trace(drawn.model, drawn.inputs, residual=residual)


def _included(rng: random.Random, elements: list[str]) -> list[str]:
    """Patterns of units: attention's own too where there are some."""
    attention = any(name.split()[0] in ("attention", "rotary") for name in elements)
    kind = rng.choice(("heads", "qk", "v", "queries"))
    if not attention or rng.random() < 0.4:
        return ["*"]
    elements.append(f"asked {kind}")
    return ["*", f"*:{kind}"]


def _amount(rng: random.Random, ratios: dict[str, float]) -> tuple[Any, str]:
    """What is asked for, and its name: mostly a ratio for every unit, taken literally."""
    kind = rng.choices(("every unit", "ratio", "parameters", "macs"), (6, 1, 2, 1))[0]
    fraction = rng.choice((0.4, 0.6, 0.8))
    amounts: dict[str, Any] = {"every unit": ratios, "ratio": ratios["*"]}
    if kind == "parameters":
        amounts[kind] = lbyl.Budget(params=fraction)
    elif kind == "macs":
        amounts[kind] = lbyl.Budget(macs=fraction)
    return amounts[kind], f"asked {kind}"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def _mark(seed: int, model: nn.Module) -> None:
    """Modes, flags and hooks as a caller may have them, for a compression to leave alone."""
    rng = random.Random(f"marks {seed}")
    if rng.random() < 0.3:
        model.train()
        rng.choice(list(model.modules())).eval()
    rng.choice(list(model.parameters())).requires_grad_(rng.random() < 0.5)
    if rng.random() < 0.2:
        rng.choice(list(model.modules())).register_forward_hook(_look)


def _look(module: nn.Module, args: Any, out: Any) -> None:
    return None


@contextmanager
def unchanged(model: nn.Module, attributes: bool = True) -> Iterator[None]:
    """The model, the random states and torch's settings are the same afterwards."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)

    def look() -> dict[str, object]:
        return {**fingerprint(model), **(remembered(model) if attributes else {})}

    before, around = look(), surroundings()
    yield
    after = look()
    changed = [name for name in before if before[name] != after.get(name)]
    changed += [name for name in after if name not in before]
    _require(not changed, f"the given model is unchanged: {', '.join(changed[:3])} is not")
    moved = [name for name, value in surroundings().items() if value != around[name]]
    _require(not moved, f"random states and settings are unchanged: {', '.join(moved)} is not")


def remembered(model: nn.Module) -> dict[str, object]:
    """What modules keep besides their state: unsaved buffers, tensors, lists, numbers."""
    own = set(vars(nn.Module())) | {"inner", "function", "spelling"}
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            found[f"buffer {name}.{key}"] = _bits(buffer)
        for key, value in vars(module).items():
            if key not in own:
                found[f"attribute {name}.{key}"] = _bits(value)
    return found


def _bits(value: Any) -> object:
    """What a value is made of, to compare by equality; other objects by which they are."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_bits, value))
    if isinstance(value, dict):
        return tuple((key, _bits(item)) for key, item in value.items())
    return value if isinstance(value, (int, float, complex, str, type(None))) else id(value)


def surroundings() -> dict[str, Any]:
    """What belongs to the caller besides the model: random states and torch's settings."""
    return {
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "Python's random state": random.getstate(),
        "NumPy's random state": np.random.get_state()[1].tobytes(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "hooks on all modules": len(nn.modules.module._global_forward_hooks),
    }


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Outputs in evaluation mode, whatever mode the model is in; it is not changed."""
    with torch.no_grad():
        given = tree_map_only(Tensor, Tensor.clone, inputs)  # some change theirs in place
        twin = copied(model).eval()
        if isinstance(given, dict):
            return flat(twin(**given))
        return flat(twin(*given) if isinstance(given, tuple) else twin(given))


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also where a weight was computed in a forward and is no leaf of the graph."""
    held = [value for module in model.modules() for value in vars(module).values()]
    computed = [x for x in held if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in computed})


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also those that are not saved; tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def left_along(graph: lbyl.Graph, kept: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
    """For every axis of a parameter with channels of units: which of its indices stay."""
    mask = torch.ones(graph.numbers + 1, dtype=torch.bool)  # the last stands for no channel
    for name, indices in kept.items():
        unit = graph[name]
        mask[unit.start : unit.start + unit.channels] = False
        mask[unit.start + indices] = True
    along = {axis: mask[channel] for axis, channel in graph.axes.items()}
    return {axis: left if left.dim() == 1 else left.all(1) for axis, left in along.items()}


def outputs(model: nn.Module, drawn: Drawn) -> list[Tensor]:
    """Outputs for each of the example inputs."""
    return [x for each in drawn.each for x in run(model, each)]


def _whole(graph: lbyl.Graph) -> lbyl.Plan:
    """The plan in which every channel stays."""
    sizes = {unit.name: unit.channels for unit in graph}
    return lbyl.Plan({name: torch.arange(size) for name, size in sizes.items()}, sizes)


def _check_identity(drawn: Drawn, whole: nn.Module) -> None:
    before, after = outputs(drawn.model, drawn), outputs(whole, drawn)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    _require(same, "ratio 0 is the identity: the outputs differ")


def silenced(model: nn.Module, graph: lbyl.Graph, plan: lbyl.Plan) -> nn.Module:
    """The original in which no consumer hears a pruned channel: those columns are zero.

    Of attention nothing is made in pruned channels either: those rows are zero.
    """
    quiet = copied(model)
    state, unread = tensors(quiet), left_along(graph, plan.kept)
    heard = {unit.name for unit in graph.units if unit.attention is not None}
    unmade = left_along(graph, {name: k for name, k in plan.kept.items() if name in heard})
    read = {(c.weight, c.axis) for c in graph.consumers.values()}
    with torch.no_grad():
        for name, axis in graph.axes:
            left = (unread if (name, axis) in read else unmade)[name, axis]
            pruned = torch.nonzero(~left).reshape(-1)
            if len(pruned):
                state[name].index_fill_(axis, pruned, 0)
    return quiet


def _check_silenced(apart: nn.Module, drawn: Drawn, result: lbyl.Result, cut: nn.Module) -> None:
    """On the example inputs, and on others: smaller, of another sign, of other paths."""
    graph, plan = result.graph, result.plan
    left = left_along(graph, plan.kept)
    if any(not left.get((n.weight, 0), torch.ones(1)).all() for n in graph.channel_norms):
        return  # a norm over fewer channels is right to first order only
    quiet = silenced(apart, graph, plan)
    for each in drawn.each:
        off = distance(run(quiet, each), run(cut, each))
        _require(off < EXACT, f"method none equals silencing: it is off by {off:.1e}")
    told = any("do not reach it" in line for line in result.fallbacks)
    for other in () if told else drawn.others:
        try:
            reference = run(quiet, other)
        except Exception:  # the network does not take these
            continue
        try:
            off = distance(reference, run(cut, other))
        except Exception as error:
            raise Broken(f"other inputs run as they did: {error}") from error
        _require(off < EXACT, f"other inputs equal silencing: off by {off:.1e}")


def _check_budget(model: nn.Module, result: lbyl.Result, amount: Any) -> None:
    """What is returned is within what was asked for, counted on the networks themselves."""
    if not isinstance(amount, lbyl.Budget):
        return
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, result.model))
    if amount.params is not None:
        _require(after <= amount.params * before, f"{after} parameters are within the budget")
    if amount.macs is not None:
        within = result.after.macs <= amount.macs * result.before.macs
        _require(within, f"{result.after.macs} multiplications are within the budget")


def _check_sizes(result: lbyl.Result) -> None:
    """Shapes are those planned, attributes tell them, and the counts are those of the model."""
    graph, state = result.graph, tensors(result.model)
    for (name, axis), flags in left_along(graph, result.plan.kept).items():
        if name not in state:
            continue  # of an expert: all of them are one tensor again
        left = int(flags.sum())
        _require(state[name].shape[axis] == left, f"{name} has {left} of {len(flags)} left")
    counted = sum(p.numel() for p in result.model.parameters())
    _require(counted == result.after.parameters, "parameters are counted as they are")
    _require(result.after.macs <= result.before.macs, "multiplications do not grow")
    for name, module in result.model.named_modules():
        if type(module) is nn.Linear:
            said = (module.out_features, module.in_features)
            _require(said == tuple(module.weight.shape), f"{name} tells its own size")


def _check_restored(
    drawn: Drawn, prepared: lbyl.Prepared, restored: lbyl.Result, method: lbyl.methods.Method
) -> None:
    called = method.name
    for name, value in tensors(restored.model).items():
        original = tensors(drawn.model).get(name)
        if original is None or bool(original.isfinite().all()):
            _require(bool(value.isfinite().all()), f"{called} writes what is finite: {name} is not")
    before, after = outputs(drawn.model, drawn), outputs(restored.model, drawn)
    shapes = [x.shape for x in before] == [x.shape for x in after]
    _require(shapes, f"{called} gives outputs of the same shapes")
    if not method.needs_statistics:
        return  # it does not go by statistics that it could be measured on
    known = lbyl.Prepared(
        drawn.model, drawn.inputs, prepared.graph, prepared.statistics(method.source)
    )
    nothing = known.compress(restored.plan, method=replace(NONE, correction="mean"))
    for written, bare in zip(restored.rows, nothing.rows, strict=True):
        if written.error is not None and bare.error is not None:
            better = written.error <= 1.02 * bare.error + 1e-6
            told = f"{written.error:.3g} instead of {bare.error:.3g} behind {written.unit}"
            _require(better, f"{called} is no worse than nothing on its statistics: {told}")


def _check_reloads(drawn: Drawn, result: lbyl.Result, seed: int, without: Collection[str]) -> None:
    """Saved and loaded into the network of the same seed with other weights: the same bits."""
    fresh = reset(draw(seed, without).model, seed + 1)
    _mark(seed, fresh)  # torch picks its kernels by these flags, too
    directory = Path(tempfile.mkdtemp(prefix="lbyl-fuzz-"))
    try:
        lbyl.save(result, directory / "out")
        lbyl.load(directory / "out", fresh)
    finally:
        shutil.rmtree(directory)
    before, after = outputs(result.model, drawn), outputs(fresh, drawn)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    _require(same, "save and load give the same bits: the outputs differ")
