"""Checks that every method and every criterion has to pass, also one of a user's own.

In the spirit of scikit-learn's `check_estimator`: `lbyl.methods.check(MyMethod())` and
`lbyl.criteria.check(MyCriterion())` run what is here on networks of a few channels. The first check
that fails is an `LbylError` that names the check and what failed it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.api import Prepared, prepare
from lbyl.errors import LbylError
from lbyl.graph.unit import Unit
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.methods import Method
from lbyl.methods import registry as methods
from lbyl.planning.criteria import Criterion
from lbyl.planning.criteria import registry as criteria
from lbyl.planning.plan import Plan
from lbyl.runtime.registry import Named, Registry
from lbyl.runtime.session import OwnDraws
from lbyl.runtime.tensors import is_finite, tensors
from lbyl.statistics.moments import Statistics

CHANNELS = 8  # of every layer; even, so that filters come in pairs
EXACT = 1e-6  # of the output's norm, in float64
RATIOS = (0.25, 0.5, 0.95)  # the last leaves one channel


class _Failed(Exception):
    """What a check saw."""


def check_method(method: str | Method) -> None:
    """Run every check on a method, by name or as an object; the first that fails raises."""
    resolved = methods.resolve(method)
    if not isinstance(resolved, Method):
        raise LbylError(f"{method!r} is no method: derive it from lbyl.methods.Method")
    _run(METHOD_CHECKS, resolved, methods)


def check_criterion(criterion: str | Criterion) -> None:
    """Run every check on a criterion, by name or as an object; the first that fails raises."""
    resolved = criteria.resolve(criterion)
    if not isinstance(resolved, Criterion):
        raise LbylError(f"{criterion!r} is no criterion: derive it from lbyl.criteria.Criterion")
    _run(CRITERION_CHECKS, resolved, criteria)


def _run(checks: Mapping[str, Check], subject: Any, registry: Registry[Any]) -> None:
    noun = registry.noun
    if getattr(subject, "name", None) not in registry.names():
        raise LbylError(
            f"{noun} {type(subject).__name__} fails the check 'registered': it has no name; "
            f'decorate the class with @register("name")'
        )
    networks = specimens()
    for name, check in checks.items():
        told = f"{noun} {subject.name!r} fails the check {name!r}"
        try:
            check(subject, networks)
        except _Failed as failed:
            raise LbylError(f"{told}: {failed}") from None
        except Exception as error:
            raise LbylError(f"{told}: {type(error).__name__}: {error}") from error


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise _Failed(message)


@dataclass(frozen=True)
class Specimen:
    """A small network in float64 with inputs for it."""

    model: nn.Module
    inputs: Tensor

    @cached_property
    def prepared(self) -> Prepared:
        return prepare(self.model, self.inputs)

    @property
    def units(self) -> list[tuple[Unit, UnitWeights]]:
        weights = unit_weights(self.prepared.graph, self.model)
        return [(unit, weights[unit.name]) for unit in self.prepared.graph]

    @property
    def output(self) -> Tensor:
        output: Tensor = self.model(self.inputs)
        return output.detach()

    def plan(self, kept: Tensor) -> Plan:
        """The same channels kept in every unit."""
        graph = self.prepared.graph
        return Plan({u.name: kept for u in graph}, {u.name: u.channels for u in graph})

    def statistics(self, needed: bool, source: str = "procedural") -> Statistics | None:
        return self.prepared.statistics(source) if needed else None


Specimens = Mapping[str, Specimen]
Check = Callable[[Any, Specimens], None]


def specimens(pairs: bool = False) -> Specimens:
    """Small networks, described; with `pairs` every second channel equals the one before it."""
    with OwnDraws():
        made = {
            "with BatchNorm": Specimen(_convolutions(True), torch.randn(4, 3, 8, 8).double()),
            "without BatchNorm": Specimen(_convolutions(False), torch.randn(4, 3, 8, 8).double()),
            "of linear layers": Specimen(_linear(), torch.randn(4, 12).double()),
        }
        if not pairs:
            off = Specimen(_convolutions(True), torch.randn(4, 3, 8, 8).double())
            _switch_off(off.model)
            made["with filters switched off"] = off
    for specimen in made.values() if pairs else ():
        _pair(specimen.model)
    return made


def _convolutions(norm: bool) -> nn.Module:
    def block(inputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, CHANNELS, 3, padding=1, bias=not norm)
        return [convolution, *([nn.BatchNorm2d(CHANNELS)] if norm else []), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 5)]
    model = nn.Sequential(*block(3), *block(CHANNELS), *head).double().eval()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.5)
    return model


def _linear() -> nn.Module:
    layers = [nn.Linear(12, CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, CHANNELS), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(CHANNELS, 5)).double().eval()


@torch.no_grad()
def _switch_off(model: nn.Module) -> None:
    """Filters of zeros, and one that BatchNorm multiplies by zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight[:2] = 0
        elif isinstance(module, nn.BatchNorm2d):
            module.weight[1:3] = 0


@torch.no_grad()
def _pair(model: nn.Module) -> None:
    """Make every second channel the same as the one before it, up to its consumers."""
    *inner, _ = [m for m in model.modules() if not list(m.children())]
    for module in inner:
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.dim() and len(tensor) == CHANNELS:
                tensor[1::2] = tensor[::2]


def _serialisable(subject: Named, registry: Registry[Any]) -> None:
    """What `to_dict` tells is JSON and gives the same object again."""
    again = registry.resolve(json.loads(json.dumps(subject.to_dict())))
    _demand(again == subject, f"{subject!r} comes back from JSON as {again!r}")
    try:
        hash(subject)
    except TypeError:
        raise _Failed("it is not frozen: use @dataclass(frozen=True)") from None


def method_serialisable(method: Method, networks: Specimens) -> None:
    _serialisable(method, methods)


def criterion_serialisable(criterion: Criterion, networks: Specimens) -> None:
    _serialisable(criterion, criteria)


def method_identity(method: Method, networks: Specimens) -> None:
    """Nothing pruned changes nothing."""
    for kind, specimen in networks.items():
        slim = specimen.prepared.compress(0.0, method=method).model
        same = torch.equal(slim(specimen.inputs), specimen.output)
        _demand(same, f"ratio 0 changes the output of a network {kind}")
        for unit, weights in specimen.units:
            kept = torch.arange(unit.channels)
            statistics = specimen.statistics(method.needs_statistics, method.source)
            matrix = method.deliver(weights, kept, statistics).matrix.cpu().double()
            close = torch.allclose(matrix, torch.eye(unit.channels, dtype=torch.float64))
            _demand(close, f"with all channels kept its matrix is not the identity, {kind}")


def method_choice(method: Method, networks: Specimens) -> None:
    """A method that chooses names as many channels as it is asked for."""
    if method.chooses:
        for kind, specimen in networks.items():
            for _, weights in specimen.units:
                for count in range(1, CHANNELS + 1):
                    _check_indices(method.select(weights, count), count, kind)


def method_shape(method: Method, networks: Specimens) -> None:
    """A delivery matrix has a row for every channel, a column for every kept one."""
    kept = torch.tensor([0, 3, 5])
    for kind, specimen in networks.items():
        statistics = specimen.statistics(method.needs_statistics, method.source)
        for unit, weights in specimen.units:
            shape = tuple(method.deliver(weights, kept.clone(), statistics).matrix.shape)
            wanted = (unit.channels, len(kept))
            _demand(shape == wanted, f"its matrix is {shape} instead of {wanted}, {kind}")


def method_finite(method: Method, networks: Specimens) -> None:
    """However much is pruned, and whatever is kept, what it writes is finite."""
    for kind, specimen in networks.items():
        first = specimen.plan(torch.arange(CHANNELS // 2))  # keeps filters that are switched off
        for amount in (*RATIOS, first):
            told = "with the first half kept" if amount is first else f"at ratio {amount}"
            result = specimen.prepared.compress(amount, method=method)
            for line in result.fallbacks:
                _demand("finite" not in line, f"{line} {told} in a network {kind}")
            for name, tensor in tensors(result.model).items():
                finite = not tensor.dtype.is_floating_point or is_finite(tensor)
                _demand(finite, f"{name} is not finite {told} in a network {kind}")


def method_deterministic(method: Method, networks: Specimens) -> None:
    """Twice the same question, twice the same weights."""
    _check_repeats(lambda prepared: prepared.compress(0.5, method=method).model, networks)


def method_unchanged(method: Method, networks: Specimens) -> None:
    """The model given is never changed."""
    _check_unchanged(lambda prepared: prepared.compress(0.5, method=method).model, networks)


def method_duplicates(method: Method, networks: Specimens) -> None:
    """Where it claims to, it restores a pruned channel that equals a kept one exactly."""
    if not method.restores_duplicates:
        return
    bare = replace(method, correction="none")  # the method, not what follows it
    for kind, specimen in specimens(pairs=True).items():
        plan = specimen.plan(torch.arange(0, CHANNELS, 2))
        slim = specimen.prepared.compress(plan, method=bare).model
        before, after = specimen.output, slim(specimen.inputs).detach()
        error = float((after - before).norm() / before.norm())
        _demand(error < EXACT, f"pruning duplicates changes a network {kind} by {error:.1e}")


def criterion_choice(criterion: Criterion, networks: Specimens) -> None:
    """It names as many channels as it is asked for, all of them where nothing is pruned."""
    for kind, specimen in {**networks, **specimens(pairs=True)}.items():
        statistics = specimen.statistics(criterion.needs_statistics)
        for _, weights in specimen.units:
            for count in range(1, CHANNELS + 1):
                _check_indices(criterion.select(weights, count, statistics), count, kind)


def criterion_deterministic(criterion: Criterion, networks: Specimens) -> None:
    """Twice the same question, twice the same choice."""
    _check_repeats(lambda prepared: prepared.compress(0.5, criterion=criterion).model, networks)


def criterion_unchanged(criterion: Criterion, networks: Specimens) -> None:
    """The model given is never changed."""
    _check_unchanged(lambda prepared: prepared.compress(0.5, criterion=criterion).model, networks)


def _check_indices(kept: Tensor, count: int, kind: str) -> None:
    ascending = sorted(set(kept.tolist()))
    fits = kept.tolist() == ascending and ascending[0] >= 0 and ascending[-1] < CHANNELS
    _demand(
        len(kept) == count and fits,
        f"asked for {count} of {CHANNELS} channels it keeps {kept.tolist()} in a network {kind}; "
        "kept channels are ascending indices, each once",
    )


Compressed = Callable[[Prepared], nn.Module]


def _check_repeats(compressed: Compressed, networks: Specimens) -> None:
    for kind, specimen in networks.items():
        first, second = (tensors(compressed(specimen.prepared)) for _ in range(2))
        same = all(torch.equal(first[name], second[name]) for name in first)
        _demand(same, f"two runs on a network {kind} differ; draw from a seed of its own")


def _check_unchanged(compressed: Compressed, networks: Specimens) -> None:
    for specimen in networks.values():
        before = {name: tensor.clone() for name, tensor in tensors(specimen.model).items()}
        compressed(specimen.prepared)
        after = tensors(specimen.model)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        _demand(not changed, f"it changes {', '.join(changed)} of the model that it was given")


METHOD_CHECKS: Mapping[str, Check] = {
    "serialisable": method_serialisable,
    "choice": method_choice,
    "shape": method_shape,
    "the model is not changed": method_unchanged,
    "ratio 0 is the identity": method_identity,
    "finite": method_finite,
    "deterministic": method_deterministic,
    "duplicates": method_duplicates,
}
CRITERION_CHECKS: Mapping[str, Check] = {
    "serialisable": criterion_serialisable,
    "choice": criterion_choice,
    "the model is not changed": criterion_unchanged,
    "deterministic": criterion_deterministic,
}
