"""What must hold for every network, checked on the one of a seed."""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lbyl
from lbyl.graph.unit import Graph
from lbyl.planning.plan import Plan
from lbyl.restoring.rewrite import restore
from lbyl.surgery.indices import kept_along, kept_indices, kept_mask
from lbyl.torchkit.fallbacks import noting
from lbyl.torchkit.run import call_model
from lbyl.torchkit.tensors import tensors
from support.fuzz.architectures import Drawn, draw, reset
from support.networks import fingerprint
from support.reference import distance, flat

EXACT = 1e-7  # relative, in float64: some networks divide by what nearly cancels
IMAGES = 12
RATIOS = (0.25, 0.5, 0.75)
NONE = lbyl.methods.resolve("none")


class Broken(AssertionError):
    """A promise that does not hold; the message says which."""


@dataclass(frozen=True)
class Kept:
    """What was seen of one network that keeps all promises."""

    units: int
    method: str | None = None  # None where nothing can be pruned


def check(seed: int) -> Kept:
    """Every promise on the network of this seed; raises `Broken`, or what the library raises."""
    rng = random.Random(f"promises {seed}")
    drawn = draw(seed)
    model = drawn.model
    _mark(seed, model)
    with unchanged(model):
        graph = lbyl.trace(model, drawn.inputs, residual=rng.random() < 0.4)
        if not graph.units:
            _require(bool(graph.unprunable), "a reason for every layer: there is none")
            return Kept(0)
        prepared = lbyl.Prepared(model, drawn.inputs, graph, IMAGES)
        options: dict[str, Any] = {"method": rng.choice(lbyl.methods.names())}
        method = lbyl.methods.resolve(options["method"])
        if not method.chooses:
            options["criterion"] = rng.choice(["l1", "l2", "l2-gm", "random"])
        restored = prepared.compress({"*": rng.choice(RATIOS)}, **options)
        cut = restore(model, graph, restored.plan, NONE, None).model
    _check_identity(drawn, graph)
    _check_silenced(drawn, graph, restored.plan, cut)
    _check_sizes(restored)
    _check_restored(drawn, prepared, restored, method)
    _check_reloads(drawn, restored, seed)
    return Kept(len(graph.units), method.name)


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
def unchanged(model: nn.Module) -> Iterator[None]:
    """The model, the random states and torch's settings are the same afterwards."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before, around = fingerprint(model), surroundings()
    yield
    after = fingerprint(model)
    changed = [name for name in before if before[name] != after.get(name)]
    changed += [name for name in after if name not in before]
    _require(not changed, f"the given model is unchanged: {', '.join(changed[:3])} is not")
    moved = [name for name, value in surroundings().items() if value != around[name]]
    _require(not moved, f"random states and settings are unchanged: {', '.join(moved)} is not")


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
        return flat(call_model(copy.deepcopy(model).eval(), copy.deepcopy(inputs)))


def _check_identity(drawn: Drawn, graph: Graph) -> None:
    sizes = {unit.name: unit.channels for unit in graph}
    plan = Plan({name: torch.arange(size) for name, size in sizes.items()}, sizes)
    whole = restore(drawn.model, graph, plan, NONE, None).model
    before, after = run(drawn.model, drawn.inputs), run(whole, drawn.inputs)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    _require(same, "ratio 0 is the identity: the outputs differ")


def silenced(model: nn.Module, graph: Graph, plan: Plan) -> nn.Module:
    """The original in which no consumer hears a pruned channel: those columns are zero."""
    quiet = copy.deepcopy(model)
    state, mask = tensors(quiet), kept_mask(graph, plan.kept)
    with torch.no_grad():
        for consumer in graph.consumers.values():
            pruned = torch.nonzero(~kept_along(consumer.channel, mask)).reshape(-1)
            state[consumer.weight].index_fill_(consumer.axis, pruned, 0)
    return quiet


def _check_silenced(drawn: Drawn, graph: Graph, plan: Plan, cut: nn.Module) -> None:
    indices = kept_indices(graph, plan.kept)
    if any((norm.weight, 0) in indices for norm in graph.channel_norms):
        return  # a norm over fewer channels is right to first order only
    quiet = silenced(drawn.model, graph, plan)
    off = distance(run(quiet, drawn.inputs), run(cut, drawn.inputs))
    _require(off < EXACT, f"method none equals silencing: it is off by {off:.1e}")


def _check_sizes(result: lbyl.Result) -> None:
    """Shapes are those planned, attributes tell them, and the counts are those of the model."""
    graph, state = result.graph, tensors(result.model)
    mask = kept_mask(graph, result.plan.kept)
    for (name, axis), channel in graph.axes.items():
        left = int(kept_along(channel, mask).sum())
        _require(state[name].shape[axis] == left, f"{name} has {left} of {len(channel)} left")
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
    before, after = run(drawn.model, drawn.inputs), run(restored.model, drawn.inputs)
    shapes = [x.shape for x in before] == [x.shape for x in after]
    _require(shapes, f"{called} gives outputs of the same shapes")
    if not method.needs_statistics:
        return  # it does not go by statistics that it could be measured on
    graph, plan, statistics = prepared.graph, restored.plan, prepared.statistics(method.source)
    with noting():
        nothing = restore(drawn.model, graph, plan, NONE, statistics)
        something = restore(drawn.model, graph, plan, method, statistics)
    for name, written in something.consumers.items():
        error, bare = written.error, nothing.consumers[name].error
        if error is not None and bare is not None:
            better = error <= 1.02 * bare + 1e-6
            told = f"{error:.3g} instead of {bare:.3g} in {name}"
            _require(better, f"{called} is no worse than nothing on its statistics: {told}")


def _check_reloads(drawn: Drawn, result: lbyl.Result, seed: int) -> None:
    """Saved and loaded into the network of the same seed with other weights: the same bits."""
    fresh = reset(draw(seed).model, seed + 1)
    _mark(seed, fresh)  # torch picks its kernels by these flags, too
    directory = Path(tempfile.mkdtemp(prefix="lbyl-fuzz-"))
    try:
        lbyl.save(result, directory / "out")
        lbyl.load(directory / "out", fresh)
    finally:
        shutil.rmtree(directory)
    before, after = run(result.model, drawn.inputs), run(fresh, drawn.inputs)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    _require(same, "save and load give the same bits: the outputs differ")
