"""The network that is worked on: a copy that runs in place of the one that was given.

It shares the weights, which are large, and nothing else: whatever `forward` writes stays out of the
network given. One run on the example shows what else it does: which global random generators it
draws from, which weights it changes (those are copied, too), whether it needs gradients.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.runtime.copies import deep_copy, set_modes
from lbyl.runtime.format import first_line, place_of
from lbyl.runtime.habits import Habits, minding
from lbyl.runtime.run import Inputs, call_model, described, evaluation_mode, ran_on, uncompiled

FEW = 2  # examples of a batch that are run
LOOKS = 3  # at whether a generator moves while the network runs, and never while it does not
SCRIPTED = (
    "the model is compiled by torch.jit (scripted or traced), which hides what its layers do: "
    "give the torch.nn.Module that it was made from"
)


@dataclass(frozen=True)
class Guest:
    """A network to work on in place of the one given, in evaluation mode."""

    model: nn.Module = field(repr=False)
    habits: Habits = field(default_factory=Habits)
    modes: Mapping[str, bool] = field(default_factory=dict, repr=False)  # of the one given

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, apart: Callable[[nn.Module], nn.Module]) -> Guest:
        """A copy of a network that shares its weights; it has run once, on a few examples.

        `apart` gives the network with the layers apart that share one tensor.
        """
        model = uncompiled(model)
        modes = {name: module.training for name, module in model.named_modules()}
        twin = _copied(model)
        try:
            habits = _seen(twin, inputs, strict=True)
        except _Writes:
            habits = _seen(_copied(model, None), inputs)
            twin = _copied(model, habits.writes)
        return cls(apart(twin.eval()), habits, modes)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs inside mind the network's habits; an error that it raises itself is explained."""
        try:
            with minding(self.habits):
                yield
        except LbylError:
            raise
        except Exception as error:
            told = ran_on(error)
            if told is None:
                raise
            raise LbylError(
                f"the model's forward fails{place_of(error)} when it is run on "
                f"{told}: {first_line(error)}. It must run on inputs like the "
                "example, and in batches of other sizes"
            ) from error

    def hand_over(self, slim: nn.Module) -> None:
        """Put a network made from this one into the modes of the network given."""
        set_modes(slim, self.modes)


def _copied(model: nn.Module, own: Collection[str] | None = ()) -> nn.Module:
    """A copy that shares all weights but its `own`, by name; None: it shares none."""
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        whole = own is None or name in own
        memo[id(parameter)] = _alias(parameter, whole)
    try:
        return deep_copy(model, memo)
    except Exception as error:
        raise LbylError(
            f"the model cannot be copied ({first_line(error)}); copy.deepcopy must work on it"
        ) from error


def _alias(parameter: nn.Parameter, whole: bool) -> nn.Parameter:
    """Another parameter in the same memory, or in its own as a `whole`."""
    if type(parameter) is not nn.Parameter:  # lazy ones, and those of other libraries
        return parameter
    values = parameter.detach()
    twin = nn.Parameter(values.clone() if whole else values, parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


class _Writes(BaseException):
    """A network is about to change weights that it shares; no code of its own may catch this."""


class _Probe(TorchDispatchMode):
    """Sees what a run does: whether it draws from torch's generator, and which weights it changes.

    A `strict` one ends the run before the first weight is changed.
    """

    def __init__(self, model: nn.Module, strict: bool) -> None:
        super().__init__()
        self.strict = strict
        self.draws = False
        self.written: set[str] = set()
        self.names = {_memory(x): name for name, x in model.named_parameters() if x.numel()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = self.draws or _draws(schema, args, kwargs)
        if schema.is_mutable:
            self._look(schema, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for argument, value in _given(schema, args, kwargs):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in tree_flatten(value)[0]:
                name = self.names.get(_memory(x)) if isinstance(x, Tensor) else None
                if name is not None:
                    self.written.add(name)
                    if self.strict:
                        raise _Writes


def _given(
    schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Arguments as a function declares them, with what it was given."""
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _draws(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws: many only may, such as attention whose dropout is switched off."""
    off = {"p": 0, "dropout_p": 0, "train": False, "training": False}
    for argument, value in _given(schema, args, kwargs):
        if argument.name == "generator" and value is not None:
            return value is torch.default_generator
        if argument.name in off and value is not None and value == off[argument.name]:
            return False
    optional = {a.name: a.default_value for a in schema.arguments if a.name in off}
    given = {argument.name for argument, _ in _given(schema, args, kwargs)}
    return not any(v == off[n] for n, v in optional.items() if n not in given and v is not None)


def _memory(x: Tensor) -> int:
    """What tells the memory behind tensors apart."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # it has none, or none of its own
        return -id(x)


def _seen(model: nn.Module, inputs: Inputs, strict: bool = False) -> Habits:
    """What a network does in a run on a few examples."""
    probe, before = _Probe(model, strict), _states()

    def run(habits: Habits) -> None:
        with probe, minding(habits):
            model.eval()
            with evaluation_mode(model):
                _run(model, inputs)

    def again() -> None:
        with suppress(Exception):  # it may fail in one run of several
            run(habits)

    habits, start = Habits(), time.perf_counter()
    try:
        try:
            run(habits)
        except Exception as error:
            habits = Habits(differentiates=True)
            try:
                run(habits)
            except Exception:  # gradients are not what it lacks
                raise does_not_run(inputs, error) from error
    finally:
        seconds = time.perf_counter() - start
        draws = {
            name for name in before if name != "torch" and _moves(name, before, again, seconds)
        }
        draws |= {"torch"} if probe.draws else set()
        for name in draws:
            _set_state(name, before[name])
    return replace(habits, draws=frozenset(draws), writes=frozenset(probe.written))


def does_not_run(inputs: Inputs, error: Exception) -> LbylError:
    """What is said of a network that fails on the example."""
    return LbylError(
        f"the model does not run on the example inputs ({described(inputs)}): "
        f"{first_line(error)}{place_of(error)}. Pass inputs as the model's forward takes them: a "
        "tensor, a tuple or a dict."
    )


@torch.no_grad()
def _run(model: nn.Module, inputs: Inputs) -> None:
    """A run on a few examples of the batch; on all where it takes no fewer."""
    first = next((x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.dim()), None)
    batch = 0 if first is None else len(first)
    if batch > FEW:

        def few(x: Tensor) -> Tensor:
            return x[:FEW] if x.dim() and len(x) == batch else x

        try:
            call_model(model, tree_map_only(Tensor, few, inputs))
        except Exception:  # whatever it says to a smaller batch
            pass
        else:
            return
    call_model(model, inputs)


def _states() -> dict[str, Any]:
    """The states of the global generators."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _set_state(name: str, state: Any) -> None:
    if name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        random.setstate(state)
    else:
        sys.modules["numpy"].random.set_state(state)


def _moves(name: str, before: Mapping[str, Any], run: Callable[[], object], seconds: float) -> bool:
    """Whether a generator moves as the network runs, and not as another thread draws from it.

    Nobody tells who draws. If it is the network, it moves in every run and never while none runs.
    """
    if name not in before or _same(before[name], _states()[name]):
        return False
    for _ in range(LOOKS):
        resting = _states()[name]
        time.sleep(max(seconds, 0.005))
        running = _states()[name]
        run()
        if not _same(resting, running) or _same(running, _states()[name]):
            return False
    return True


def _same(one: Any, other: Any) -> bool:
    """Whether two states of a generator, numbers and arrays of them, are the same."""
    return all(
        a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b for a, b in zip(one, other)
    )
