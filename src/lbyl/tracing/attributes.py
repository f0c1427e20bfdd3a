"""Attributes that hold a width which only other methods than `forward` read, made true after a cut.

An exporter may put `forward_split` in the place of `forward`, and that splits by `self.c`. Which
numbers mean a width cannot be told by their size: a window may be as large. So such methods are
run. One that gives what `forward` gives, on the original, must do so on the cut network; where it
does not, the attributes that it reads are tried at the new widths until it does. All other
attributes keep their values, and those that equal a width that was cut are noted.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lbyl.runtime.notes import note
from lbyl.runtime.run import Inputs, call_model, device_of, evaluation_mode, tensors_in
from lbyl.runtime.tensors import tensors
from lbyl.surgery.cut import copy_model
from lbyl.surgery.layout import set_attributes, whole_numbers
from lbyl.tracing.values import ROUGH, ROUNDING, Still, distance, precision, varied

ALTERNATIVE = "forward_"  # how methods begin that are put in the place of `forward`
TRIES = 64  # values that are tried for the attributes of one method
LEFT = (
    "numbers equal to a width that was cut keep their value, as no method shows that they mean it"
)

Widths = set[tuple[int, int]]
"""Sizes of parameters before and after a cut."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def follow_widths(slim: nn.Module, original: nn.Module, inputs: Inputs) -> None:
    """Make attributes of a cut network true, in place; note those that may not be."""
    found = dict(_suspects(slim, original))
    wanted = [name for name, (kind, _, _) in found.items() if any(kind.alternatives())]
    if wanted:
        before, after = (_Calls.of(model, inputs, wanted) for model in (original, slim))
        for name in wanted:
            kind, values, widths = found[name]
            for method in kind.alternatives():
                mine = {a: values[a] for a in values if a in kind.reads(method)}
                changed = _changed(method, before, after, name, mine, widths)
                set_attributes(slim, {name: changed})
                for attribute in changed:
                    del values[attribute]
    _note_left(found)


def _note_left(found: Mapping[str, tuple[_Kind, dict[str, Any], Widths]]) -> None:
    """One note for all that keeps its value, each attribute of a class once."""
    places: dict[str, list[str]] = {}
    for name, (kind, values, _) in found.items():
        for attribute in values:
            key = f"{attribute} of {kind.kind.__name__}"
            places.setdefault(key, []).append(name or "the network")
    if places:
        several = {
            key: f" and {len(n) - 1} more" if len(n) > 1 else "" for key, n in places.items()
        }
        note(f"{LEFT}: {', '.join(f'{key} ({n[0]}{several[key]})' for key, n in places.items())}")


class _Kind:
    """What the methods of a class read of a module, those of torch's own classes aside."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        self.names: dict[str, set[str]] = {}  # of a method: every name in its code
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            if base.__module__.startswith("torch."):
                break
            for name, member in vars(base).items():
                codes = list(_codes(member))
                if codes:
                    self.names.setdefault(name, set().union(*map(_loaded, codes)))

    def reads(self, method: str) -> set[str]:
        """Names that a method reads, and methods that it calls."""
        seen, waiting = set(), [method]
        while waiting:
            for name in self.names.get(waiting.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return seen

    def alternatives(self) -> list[str]:
        return [name for name in self.names if name.startswith(ALTERNATIVE)]


def _codes(member: Any) -> Iterator[CodeType]:
    for function in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if isinstance(code, CodeType):
            yield code


def _loaded(code: CodeType) -> set[str]:
    """Names that code loads, and words in it, by which `getattr` may."""
    found = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname.startswith("LOAD") and isinstance(step.argval, str)
    }
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found.union(*map(_loaded, inner))


def _suspects(
    slim: nn.Module, original: nn.Module
) -> Iterator[tuple[str, tuple[_Kind, dict[str, Any], Widths]]]:
    """Modules with attributes that equal a width cut inside of them, and those attributes."""
    before, kinds = dict(original.named_modules()), dict[type[nn.Module], _Kind]()
    widths = _cut_widths(slim, original)
    for name, module in slim.named_modules():
        whole = before.get(name)
        if name not in widths or whole is None or type(module) is not type(whole):
            continue
        if type(module).__module__.startswith(("torch.", "lbyl.")):  # their own are true
            continue
        sizes = {old for old, _ in widths[name]}
        values = {
            attribute: value
            for attribute, value in vars(module).items()
            if not sizes.isdisjoint(whole_numbers(value)) and vars(whole).get(attribute) == value
        }
        if values:
            of = type(module)
            kinds[of] = kinds.get(of) or _Kind(of)
            yield name, (kinds[of], values, widths[name])


def _cut_widths(slim: nn.Module, original: nn.Module) -> dict[str, Widths]:
    """For every module the sizes of parameters inside that were cut, before and after."""
    found: dict[str, Widths] = {}
    after = tensors(slim)
    for name, tensor in tensors(original).items():
        new = after.get(name, tensor)
        pairs = {(a, b) for a, b in zip(tensor.shape, new.shape) if a != b}
        while pairs and name:
            name = name.rpartition(".")[0]
            found.setdefault(name, set()).update(pairs)
    return found


class _Calls:
    """A copy of a network, and what some of its modules were called with on the example."""

    def __init__(self, model: nn.Module, given: Mapping[str, Call]) -> None:
        self.model, self.given = model, given
        self.limit = ROUNDING.get(precision(model), ROUGH)

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, names: Sequence[str]) -> _Calls:
        twin, device = copy_model(model, parameters=False), device_of(model)
        given: dict[str, Call] = {}

        def remember(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                call = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
                given.setdefault(name, tree_map_only(Tensor, varied, call))

            return hook

        hooks = [
            twin.get_submodule(name).register_forward_pre_hook(remember(name), with_kwargs=True)
            for name in names
        ]
        with evaluation_mode(twin), Still():
            call_model(twin, tree_map_only(Tensor, lambda x: x.to(device), inputs))
        for hook in hooks:
            hook.remove()
        return cls(twin.eval(), given)

    def gives(self, name: str, method: str) -> list[Tensor] | None:
        """What a method of a module gives; None where it does not run."""
        args, kwargs = tree_map_only(Tensor, Tensor.clone, self.given[name])
        with evaluation_mode(self.model), Still():
            try:
                return tensors_in(getattr(self.model.get_submodule(name), method)(*args, **kwargs))
            except Exception:  # whatever it complains of: it is called as `forward` is
                return None

    def same(self, name: str, method: str, expected: list[Tensor] | None) -> bool:
        """Whether a method of a module gives what is expected."""
        made = self.gives(name, method)
        return bool(made) and bool(expected) and distance(expected, made) <= self.limit  # type: ignore[arg-type]


def _changed(
    method: str,
    before: _Calls,
    after: _Calls,
    name: str,
    values: Mapping[str, Any],
    widths: Widths,
) -> dict[str, Any]:
    """New values of attributes with which a method of a cut module gives what `forward` gives."""
    reached = name in before.given and name in after.given
    if not values or not reached:
        return {}
    if not before.same(name, method, before.gives(name, "forward")):
        return {}  # it is no other way to compute the same
    expected = after.gives(name, "forward")
    module = after.model.get_submodule(name)
    for tried in _combinations(values, widths):
        vars(module).update(tried)
        right = after.same(name, method, expected) and after.same(name, "forward", expected)
        if right:
            return {a: tried[a] for a in tried if tried[a] != values[a]}
        vars(module).update(values)
    note(f"{name}: {method} gives what forward gives in the original, and not any more")
    return {}


def _combinations(values: Mapping[str, Any], widths: Widths) -> list[dict[str, Any]]:
    """Values to try for some attributes, those that change fewest first."""
    options = []
    for value in values.values():
        new = [value]
        for old, now in sorted(widths):
            several = [now if x == old else x for x in whole_numbers(value)]
            if old in whole_numbers(value):
                new.append(several[0] if type(value) is int else type(value)(several))
        options.append(new)
    every = itertools.islice(itertools.product(*map(range, map(len, options))), 4096)
    chosen = sorted(every, key=lambda places: sum(place > 0 for place in places))[:TRIES]
    return [
        {name: options[i][place] for i, (name, place) in enumerate(zip(values, places))}
        for places in chosen
    ]
