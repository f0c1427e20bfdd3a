"""One run of a network, written down: which function was called on which tensors.

What the design must satisfy: any `forward` that runs can be recorded (modules, functional calls,
methods, in-place operations alike), the network is not changed, and no activation is kept alive
longer than the network keeps it. So torch's function calls are intercepted instead of
transforming code. What is not intercepted there (scripted functions) is noticed one level lower,
by a dispatch mode, and marked as unrecorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.graph.declare import is_leaf
from lbyl.runtime.copies import deep_copy
from lbyl.runtime.intercept import Function, Interceptor, changes_in_place, is_wrapped
from lbyl.runtime.run import Inputs, call_model, described, evaluation_mode, tensors_in
from lbyl.runtime.session import module_hooks, own_randomness
from lbyl.runtime.tensors import names_of, tensors


class Form(NamedTuple):
    """What a tensor is like apart from its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Ref:
    """A tensor in a recorded call: the value's number in the record."""

    value: int


@dataclass
class Call:
    """One function call: `args` and `kwargs` hold a Ref wherever a tensor stood."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    module: str
    trusted: bool = True  # False where it read memory that an in-place call had changed
    leaf: type[nn.Module] | None = None  # the class of a module recorded as a single call
    looked_at: set[int] = field(default_factory=set)  # values whose numbers decide on its shapes

    @cached_property
    def op(self) -> str:
        """The bare name of the function: `conv2d`, `add`, `__getitem__`."""
        return self.name.rsplit(".", 1)[-1]


@dataclass
class Record:
    """The calls of one run, the shape of every value, and which values are parameters.

    No tensor is kept: activations live no longer than in a plain run.
    """

    calls: list[Call] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)  # integers: indices where masks are booleans
    parameters: dict[int, str] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    unrecorded: set[int] = field(default_factory=set)  # values touched outside recorded calls
    wrapped: set[int] = field(default_factory=set)  # values read or made inside `torch.func`
    stale: set[int] = field(default_factory=set)
    failed: list[int] = field(default_factory=list)  # what the call read that ended the run
    overcome: list[list[int]] = field(default_factory=list)  # what calls read that failed, no more
    # Module → values that its own code could read: of its calls, and of the modules that it calls.
    frames: dict[str, set[int]] = field(default_factory=lambda: {"": set()}, repr=False)
    kept: set[int] = field(
        default_factory=set, repr=False
    )  # values that modules keep on themselves
    leaves: dict[str, nn.Module] = field(default_factory=dict, repr=False)  # by name
    forms: list[Form] = field(default_factory=list, repr=False)  # of every value, as it was

    @property
    def goes_by_values(self) -> bool:
        """Whether numbers that the network computes with its weights decide what else it does.

        Code that nobody looks into may always do so.
        """
        if self.unrecorded:
            return True
        made = set(self.parameters)
        for call in self.calls:
            if not made.isdisjoint(call.looked_at):
                return True
            if not made.isdisjoint(call.inputs):
                made.update(call.outputs)
        return False


_ROOM = frozenset(vars(nn.Module()))  # what every module has

# Reads of a tensor's description: they move no data, so nothing follows from them.
_DESCRIPTIONS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "stride",
    "is_floating_point",
    "is_complex",
    "data_ptr",
    "__len__",
    "get_device",
    "is_contiguous",
    "element_size",
    "storage_offset",
    "untyped_storage",
    "requires_grad_",
    "register_hook",
    "has_torch_function",
    "nelement",
    "is_inference",
    "_is_view",
}
CASTS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "to": None,  # what these make is among their arguments
    "type": None,
    "type_as": None,
}

# Functions that read values and are seen by no dispatch mode.
READING = ("tolist", "numpy", "__array__", "__dlpack__")
VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
MASKS = (torch.bool, torch.uint8)


class Recorder(Interceptor):
    """Writes every torch function call into a `Record`.

    With the record of a run that succeeded, a call that fails now gives tensors of the shapes that
    it gave then, so that one run shows all that fails.
    """

    def __init__(
        self,
        record: Record,
        names: Mapping[int, str],
        before: Record | None = None,
    ) -> None:
        super().__init__()
        self.record = record
        self.before = before
        # Values whose numbers the running call has looked at; None is any that it reads.
        self.looked_at: set[int | None] = set()
        self.inside = 0
        self.names = names  # id of a parameter or buffer → its name in the model
        self.depth = 0
        self.modules: list[str] = [""]
        self._names: dict[Function, tuple[str, bool]] = {}
        # By a tensor's id, which is unique while it lives: then its entry is taken out.
        self._numbers: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._storages: dict[int, list[int]] = {}

    def number(self, tensor: Tensor) -> int:
        """The number of the value this tensor now holds, a new one at its first sight."""
        key = id(tensor)
        if key not in self._numbers:
            value = self._assign(tensor)
            if key in self.names:
                self.record.parameters[value] = self.names[key]
        return self._numbers[key][0]

    def known(self, some: Iterable[Tensor]) -> set[int]:
        """The numbers of those of these tensors that calls have met."""
        return {self._numbers[id(x)][0] for x in some if id(x) in self._numbers}

    def _assign(self, tensor: Tensor) -> int:
        record, key = self.record, id(tensor)
        value = len(record.shapes)
        # An empty tensor counts as one entry, so that its channels are still seen.
        shape = tensor.shape
        record.shapes.append(shape if all(shape) else torch.Size(max(1, size) for size in shape))
        record.forms.append(Form(shape, tensor.dtype, tensor.device))
        record.whole.append(tensor.dtype not in MASKS)
        gone = self._numbers.pop
        self._numbers[key] = value, weakref.ref(tensor, lambda _: gone(key, None))
        # The memory of a tensor that is gone may be another's now, which harms nobody: no call
        # reads the values that it held.
        self._storages.setdefault(_storage(tensor), []).append(value)
        return value

    def _mutate(self, tensor: Tensor) -> None:
        """An in-place call: the tensor is a new value, and other views of its memory are stale."""
        old = self._storages.get(_storage(tensor), [])
        self.record.stale.update(old)
        self._assign(tensor)

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, describes = self._name(func)
        if describes or self.inside:  # inside of a leaf module, which is recorded as a whole
            return func(*args, **kwargs)
        inputs: list[int] = []
        with torch._C.DisableTorchFunction():  # nobody needs to see how it looks at tensors
            spelled = self._spelled((args, kwargs), inputs)
        overcome = len(self.record.overcome)
        self.looked_at = {None} if name in READING else set()
        self.depth += 1
        try:
            result = func(*args, **kwargs)
        except Exception:
            result = self._as_before(name, inputs)
            if result is None:
                self.record.failed = inputs
                raise
        finally:
            self.depth -= 1
        if name in CASTS and args and result is args[0] and id(result) in self.names:
            return result  # a parameter of that type already: nothing was done
        with torch._C.DisableTorchFunction():
            self._write(func, name, spelled, inputs, args, kwargs, result)
        if len(self.record.overcome) > overcome:
            self.record.calls[-1].trusted = False
        return result

    def _name(self, func: Function) -> tuple[str, bool]:
        """The name of a function, and whether it only tells what a tensor is like."""
        if func not in self._names:
            name = getattr(func, "__name__", str(func))
            describes = name in _DESCRIPTIONS
            if name == "__get__":
                describes = not _moves_data(func)
                name = name if describes else resolve_name(func).split(".")[-2]
            self._names[func] = name, describes
        return self._names[func]

    def _spelled(self, x: Any, inputs: list[int]) -> Any:
        """Arguments with a Ref for every tensor; the numbers of all tensors go into `inputs`."""
        if isinstance(x, Tensor):
            inputs.append(self.number(x))
            return Ref(inputs[-1])
        kind = type(x)
        if kind is tuple or kind is list:
            return kind([self._spelled(item, inputs) for item in x])
        if kind is dict:
            return {key: self._spelled(item, inputs) for key, item in x.items()}
        if isinstance(x, (tuple, list, Mapping)):  # of other classes torch knows how
            inputs += [self.number(item) for item in tree_flatten(x)[0] if isinstance(item, Tensor)]
            return tree_map_only(Tensor, lambda item: Ref(self.number(item)), x)
        return x

    def _as_before(self, name: str, inputs: list[int]) -> Any:
        """Tensors as this call gave in the run before; None where that cannot be said.

        It is known by its module and how often that called it: others may be left out, for some
        networks remember what they have computed.
        """
        if self.before is None:
            return None
        made, kept = (
            [c for c in run.calls if (c.name, c.module) == (name, self.modules[-1])]
            for run in (self.record, self.before)
        )
        if len(made) >= len(kept) or changes_in_place(name, kept[len(made)].kwargs):
            return None
        call = kept[len(made)]
        if len(call.inputs) != len(inputs):
            return None
        forms = [self.before.forms[value] for value in call.outputs]
        instead = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in forms]
        self.record.overcome.append(inputs)
        return instead[0] if len(instead) == 1 else tuple(instead)

    def _write(
        self,
        func: Callable[..., Any],
        name: str,
        spelled: Any,
        inputs: list[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        trusted = self.record.stale.isdisjoint(inputs) and kwargs.get("out") is None
        parts = [result] if isinstance(result, Tensor) else tree_flatten(result)[0]
        produced = [x for x in parts if isinstance(x, Tensor)]
        if name == "__setitem__":
            produced = [args[0]]
        if changes_in_place(name, kwargs):
            for tensor in produced:
                self._mutate(tensor)
        outputs = [self.number(x) for x in produced]
        if any(map(is_wrapped, produced)):
            self.record.wrapped.update(inputs, outputs)
        self.record.frames[self.modules[-1]].update(inputs, outputs)
        if inputs or outputs:
            self.record.calls.append(
                Call(
                    func,
                    name,
                    spelled[0],
                    spelled[1],
                    inputs,
                    outputs,
                    self.modules[-1],
                    trusted,
                    looked_at=self._looked_at(inputs),
                )
            )

    def look(self, tensor: Tensor) -> None:
        """The running call looks at the numbers of a tensor."""
        self.looked_at.add(self._numbers[id(tensor)][0] if id(tensor) in self._numbers else None)

    def _looked_at(self, inputs: Iterable[int]) -> set[int]:
        if None in self.looked_at:
            return set(inputs)
        return {value for value in self.looked_at if value is not None}

    def enter(self, name: str, leaf: bool) -> None:
        """A submodule begins to run."""
        self.modules.append(name)
        self.record.frames.setdefault(name, set())
        if leaf:
            if not self.inside:
                self.looked_at = set()
            self.inside += 1
            self.depth += 1

    def leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A submodule has run; one declared a leaf is written down as a single call."""
        if is_leaf(type(module)):
            if self.inside == 1:
                self._write_leaf(module, args, kwargs, result)
            self.inside -= 1
            self.depth -= 1
        self.modules.pop()
        if self.before is None:
            self.record.kept |= self.known(_held_by(module))
        if not self.inside:
            passed = tensors_in([args, kwargs, result])
            self.record.frames[self.modules[-1]].update(self.number(x) for x in passed)

    def _write_leaf(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        own = [*module.parameters(), *module.buffers()]
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        inputs = [self.number(x) for x in [*given, *own]]
        spelled = tree_map_only(Tensor, lambda x: Ref(self.number(x)), (args, kwargs))
        trusted = not any(i in self.record.stale for i in inputs)
        produced = tensors_in(result)
        for tensor in produced:
            if id(tensor) in self._numbers:  # handed through, perhaps changed in place
                self._mutate(tensor)
        outputs = [self.number(x) for x in produced]
        kind = type(module)
        self.record.leaves[self.modules[-1]] = module
        self.record.calls.append(
            Call(
                kind,
                kind.__name__,
                spelled[0],
                spelled[1],
                inputs,
                outputs,
                self.modules[-1],
                trusted,
                kind,
                self._looked_at(inputs),
            )
        )


class _DispatchWatcher(TorchDispatchMode):
    """Marks tensors read or made outside any recorded call, as scripted functions do."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _looked_at(func, args):
            self.recorder.look(tensor)
        if self.recorder.depth == 0:
            seen = tree_flatten((args, kwargs or {}, result))[0]
            self.recorder.record.unrecorded.update(
                self.recorder.number(x) for x in seen if isinstance(x, Tensor)
            )
        return result


def _moves_data(func: Callable[..., Any]) -> bool:
    """Whether a property access such as `x.T` gives a new tensor (unlike `x.shape`)."""
    name = resolve_name(func) or ""
    return name.split(".")[-2:-1] in (["T"], ["mT"], ["H"], ["mH"], ["data"], ["real"], ["imag"])


def _looked_at(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors whose numbers decide what shapes an operation gives, or what is done next.

    Of operations that are not torch's nobody knows. Indexing looks at masks alone.
    """
    if func is torch.ops.aten.index.Tensor:
        return [x for x in args[1] if x is not None and x.dtype in MASKS]
    if func.namespace == "aten" and not any(tag in func.tags for tag in VALUES):
        return []
    return tensors_in(args)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)  # a tensor without storage shares it with nobody


@contextmanager
def _module_names(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keeps `recorder.modules` equal to the stack of running submodules."""
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        name = names.get(id(module), recorder.modules[-1])
        recorder.enter(name, is_leaf(type(module)))

    def leave(module: nn.Module, args: Any, *rest: Any) -> None:
        # After an error torch leaves the keyword arguments out; then nothing is written either.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        if len(rest) != 2 and not recorder.record.failed:
            # No call failed but the code around it, such as an assertion on sizes.
            recorder.record.failed = [recorder.number(x) for x in tensors_in(args)]
        recorder.leave(module, args, kwargs, output)

    with module_hooks(leave, enter, always=True):
        yield


def _twin(model: nn.Module) -> nn.Module:
    """The same parameters in other modules: what a forward keeps on `self` stays out of `model`."""
    kept = {id(tensor): tensor for tensor in tensors(model).values()}
    try:
        return deep_copy(model, kept)
    except Exception:  # some modules refuse copies; most of those keep nothing either
        return model


def _held_by(module: nn.Module) -> list[Tensor]:
    """Tensors that a module keeps on itself, in lists or dicts or alone."""
    kinds = (Tensor, list, tuple, dict)
    own = [v for k, v in vars(module).items() if k not in _ROOM and isinstance(v, kinds)]
    return tensors_in([own, module._buffers])


def record(
    model: nn.Module,
    inputs: Inputs,
    spare: bool = False,
    training: bool = False,
    before: Record | None = None,
) -> Record:
    """Run `model` once on `inputs` and return what it called.

    A `spare` model was made to be recorded: what its forward keeps on `self` may stay there, and
    only such a one may be recorded in `training` mode. Calls that fail give zeros of the shapes
    that they gave `before`.
    """
    model = model if spare else _twin(model)
    written = Record()
    own = tensors(model)  # held, so that nothing made in the run gets the id of one
    recorder = Recorder(written, names_of(own), before)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluation_mode(model))
        if training:
            stack.enter_context(own_randomness())
            _train(model)
        stack.enter_context(_DispatchWatcher(recorder))
        stack.enter_context(_module_names(model, recorder))
        stack.enter_context(recorder)
        try:
            output = call_model(model, inputs)
        except Exception as error:
            raise DoesNotRun(inputs, error, written) from error
    written.outputs = [recorder.number(x) for x in tensors_in(output)]
    return written


def _train(model: nn.Module) -> None:
    """Training mode, but for BatchNorms: one example has no variance to normalise by."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


class DoesNotRun(LbylError):
    """The model failed on its inputs; `record` holds the calls up to there."""

    def __init__(self, inputs: Inputs, error: Exception, record: Record) -> None:
        super().__init__(
            f"the model does not run on the example inputs ({described(inputs)}): {error}. "
            "Pass inputs as the model's forward takes them: a tensor, a tuple or a dict."
        )
        self.record = record
