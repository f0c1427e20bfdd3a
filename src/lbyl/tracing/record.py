"""One run of a network, written down: which function was called on which tensors.

What the design must satisfy: any `forward` that runs can be recorded (modules, functional calls,
methods, in-place operations alike), nothing is executed for real where shapes suffice, and the
network is not changed. So torch's function calls are intercepted instead of
transforming code. What is not intercepted there (scripted functions) is noticed one level lower,
by a dispatch mode, and marked as unrecorded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lbyl.errors import LbylError
from lbyl.graph.declare import is_leaf
from lbyl.torchkit.caches import forgetful
from lbyl.torchkit.copies import deep_copy
from lbyl.torchkit.forms import Forms
from lbyl.torchkit.intercept import Function, Interceptor, changes_in_place, is_wrapped
from lbyl.torchkit.run import (
    Inputs,
    call_model,
    described,
    device_of,
    evaluation_mode,
    tensors_in,
)
from lbyl.torchkit.shapes import Shapes
from lbyl.torchkit.surroundings import module_hooks, one_thread
from lbyl.torchkit.tensors import names_of, tensors

Given = tuple[Function, tuple[Any, ...], dict[str, Any]]
"""A function with its arguments."""

Ran = Literal["meta", "fake", "real"]
"""What a network was run on: shapes alone, torch's fake tensors (slower, they know the values of
constants), or real ones."""


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

    @cached_property
    def op(self) -> str:
        """The bare name of the function: `conv2d`, `add`, `__getitem__`."""
        return self.name.rsplit(".", 1)[-1]


@dataclass
class Record:
    """The calls of one run, the shape of every value, and which values are parameters."""

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
    ran: Ran = "meta"
    # Module → values that its own code could read: of its calls, and of the modules that it calls.
    frames: dict[str, set[int]] = field(default_factory=lambda: {"": set()}, repr=False)
    kept: set[int] = field(
        default_factory=set, repr=False
    )  # values that modules keep on themselves
    leaves: dict[str, nn.Module] = field(default_factory=dict, repr=False)  # by name
    held: list[Tensor] = field(default_factory=list, repr=False)  # so that no id is reused
    forms: Forms = field(default_factory=Forms, repr=False)  # of calls on shapes, for further runs


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
BATCH_NORM = ("running_mean", "running_var", "weight", "bias")


def _is_so_already(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a cast asks for the type that a tensor has: then torch gives the tensor itself."""
    if name not in CASTS or not args or not isinstance(args[0], Tensor):
        return False
    asked = [*args[1:], *kwargs.values()]
    kinds = [getattr(x, "dtype", x) for x in asked if isinstance(x, (Tensor, torch.dtype))]
    # Devices, layouts and copies are left to torch.
    return len(kinds) == len(asked) and all(k == args[0].dtype for k in [*kinds, CASTS[name]] if k)


def _normalised(given: Mapping[str, Any]) -> torch.Size | None:
    """The shape of what a BatchNorm gives; None where its tensors do not fit."""
    x = given["input"]
    lengths = {given[n].shape[0] for n in BATCH_NORM if isinstance(given.get(n), Tensor)}
    return x.shape if x.dim() > 1 and lengths <= {x.shape[1]} else None


def _sampled(given: Mapping[str, Any]) -> torch.Size | None:
    """The shape of what `grid_sample` gives; None where its tensors do not fit."""
    x, grid = given["input"], given["grid"]
    fits = x.dim() == grid.dim() > 3 and x.shape[0] == grid.shape[0]
    fits = fits and grid.shape[-1] == x.dim() - 2
    return torch.Size([*x.shape[:2], *grid.shape[1:-1]]) if fits else None


def _over_last(given: Mapping[str, Any]) -> torch.Size | None:
    """The shape of what a norm over the last dimensions gives; None where tensors do not fit."""
    x, over = given["input"], given.get("normalized_shape")
    if not isinstance(over, (tuple, list)) or tuple(x.shape[-len(over) :]) != tuple(over):
        return None
    parts = (given.get("weight"), given.get("bias"))
    fits = all(tuple(p.shape) == tuple(over) for p in parts if isinstance(p, Tensor))
    return x.shape if fits else None


def _resized(given: Mapping[str, Any]) -> torch.Size | None:
    """The shape of what `interpolate` gives; None where it is asked for in any other way."""
    x, size, scale = given["input"], given.get("size"), given.get("scale_factor")
    dims, asked = x.dim() - 2, scale if size is None else size
    if dims < 1 or (size is None) == (scale is None) or given.get("recompute_scale_factor"):
        return None
    numbers: list[Any] = [asked] * dims if isinstance(asked, (int, float)) else [*(asked or ())]
    plain = len(numbers) == dims and all(isinstance(one, (int, float)) for one in numbers)
    if not plain or (dims > 1 and not x.is_contiguous()):  # laid out otherwise, it stays so
        return None
    if size is None:
        numbers = [math.floor(float(n) * one) for n, one in zip(x.shape[2:], numbers)]
    return torch.Size([*x.shape[:2], *numbers]) if min(numbers) > 0 else None


def _multiplied(given: Mapping[str, Any]) -> torch.Size | None:
    """The shape of what `linear` gives; None where its tensors do not fit."""
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    fits = weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or tuple(bias.shape) == (weight.shape[0],))
    fits = fits and x.dtype == weight.dtype
    return torch.Size([*x.shape[:-1], weight.shape[0]]) if fits else None


def _attended(given: Mapping[str, Any]) -> torch.Size | None:
    """The shape of what attention gives; None where its tensors do not fit one by one."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    fits = q.dim() > 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    fits = fits and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    fits = fits and q.dtype == k.dtype == v.dtype and given.get("attn_mask") is None
    return torch.Size([*q.shape[:-1], v.shape[-1]]) if fits else None


# Functions that torch takes long to find the shapes of: names of arguments, and the shape.
KNOWN_SHAPES: dict[
    Function, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], torch.Size | None]]
] = {
    F.batch_norm: (("input", *BATCH_NORM), _normalised),
    F.grid_sample: (("input", "grid"), _sampled),
    F.layer_norm: (("input", "normalized_shape", "weight", "bias"), _over_last),
    F.interpolate: (("input", "size", "scale_factor", "mode"), _resized),
    F.linear: (("input", "weight", "bias"), _multiplied),
    F.scaled_dot_product_attention: (("query", "key", "value", "attn_mask"), _attended),
}


class Recorder(Interceptor):
    """Writes every torch function call into a `Record`.

    With the record of a run that succeeded, a call that fails now gives tensors of the shapes that
    it gave then, so that one run shows all that fails.
    """

    def __init__(
        self,
        record: Record,
        names: Mapping[int, str],
        shapes: Shapes | None = None,
        before: Record | None = None,
    ) -> None:
        super().__init__()
        self.record = record
        self.shapes = shapes  # where it runs on them
        self.before = before
        self.failing: tuple[Exception, Given] | None = None  # the last call that failed
        self.inside = 0
        self.names = names  # id of a parameter or buffer → its name in the model
        self.depth = 0
        self.modules: list[str] = [""]
        self._names: dict[Function, tuple[str, bool]] = {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, list[int]] = {}

    def number(self, tensor: Tensor) -> int:
        """The number of the value this tensor now holds, a new one at its first sight."""
        if self.shapes is not None:
            tensor = self.shapes.true(tensor)
        key = id(tensor)
        if key not in self._numbers:
            self._assign(tensor)
            if key in self.names:
                self.record.parameters[self._numbers[key]] = self.names[key]
        return self._numbers[key]

    def known(self, some: Iterable[Tensor]) -> set[int]:
        """The numbers of those of these tensors that calls have met."""
        true = (x if self.shapes is None else self.shapes.true(x) for x in some)
        return {self._numbers[id(x)] for x in true if id(x) in self._numbers}

    def _is_parameter(self, tensor: Tensor) -> bool:
        return id(tensor if self.shapes is None else self.shapes.true(tensor)) in self.names

    def _assign(self, tensor: Tensor) -> int:
        record = self.record
        value = len(record.shapes)
        # An empty tensor counts as one entry, so that its channels are still seen.
        shape = tensor.shape
        record.shapes.append(shape if all(shape) else torch.Size(max(1, size) for size in shape))
        record.whole.append(tensor.dtype not in (torch.bool, torch.uint8))
        record.held.append(tensor)  # an id is only unique while its object lives
        self._numbers[id(tensor)] = value
        self._storages.setdefault(self._storage(tensor), []).append(value)
        return value

    def _storage(self, tensor: Tensor) -> int:
        """What tells the memory behind tensors apart."""
        return _storage(tensor if self.shapes is None else self.shapes.empty(tensor))

    def _mutate(self, tensor: Tensor) -> None:
        """An in-place call: the tensor is a new value, and other views of its memory are stale."""
        old = self._storages.get(self._storage(tensor), [])
        self.record.stale.update(old)
        self._assign(tensor)

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, describes = self._name(func)
        if describes or self.inside:  # inside of a leaf module, which is recorded as a whole
            return self._call(func, args, kwargs)
        if _is_so_already(name, args, kwargs) and self._is_parameter(args[0]):
            return args[0]  # on shapes it would be another tensor, of which nobody knows the name
        inputs: list[int] = []
        with torch._C.DisableTorchFunction():  # nobody needs to see how it looks at tensors
            spelled = self._spelled((args, kwargs), inputs)
        overcome = len(self.record.overcome)
        self.depth += 1
        try:
            result = self._known_shape(func, args, kwargs)
            result = self._call(func, args, kwargs) if result is None else result
        except Exception as error:
            result = self._as_before(name, inputs)
            if result is None:
                self.record.failed = inputs
                self.failing = error, (func, args, kwargs)
                raise
        finally:
            self.depth -= 1
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

    def _call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.shapes is None:
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():  # nobody watches calls that are recorded
            return self.shapes.call(func, args, kwargs)

    def _known_shape(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """What a call gives, shape only, where torch takes long to find out; else None."""
        known = KNOWN_SHAPES.get(func)
        if known is None or self.record.ran == "real":
            return None
        names, shape_of = known
        given = dict(zip(names, args)) | kwargs
        with torch._C.DisableTorchFunction():
            x = given[names[0]]
            shape = shape_of(given)
            if shape is None:
                return None
            like = x if self.shapes is None else self.shapes.empty(x)
            with nullcontext() if self.shapes is None else torch._C._DisableTorchDispatch():
                if shape == x.shape:  # laid out alike
                    return like.new_empty_strided(shape, x.stride())
                return like.new_empty(shape)

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
        held = [self.before.held[value] for value in call.outputs]
        instead = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in held]
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
                Call(func, name, spelled[0], spelled[1], inputs, outputs, self.modules[-1], trusted)
            )

    def enter(self, name: str, leaf: bool) -> None:
        """A submodule begins to run."""
        self.modules.append(name)
        self.record.frames.setdefault(name, set())
        if leaf:
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of calls that fail on fake tensors: a failure is an answer here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _twin(model: nn.Module) -> nn.Module:
    """The same parameters in other modules: what a forward keeps on `self` stays out of `model`."""
    kept = {id(tensor): tensor for tensor in tensors(model).values()}
    try:
        return deep_copy(model, kept)
    except Exception:  # some modules refuse copies; most of those keep nothing either
        return model


def _run(
    model: nn.Module,
    inputs: Inputs,
    on: Ran,
    spare: bool = False,
    training: bool = False,
    before: Record | None = None,
    forms: Forms | None = None,
) -> Record:
    model = model if spare else _twin(model)
    own = tensors(model)
    names = names_of(own)
    written = Record(ran=on, forms=Forms() if forms is None else forms)
    shapes = Shapes(device_of(model), names, written.forms) if on == "meta" else None
    if shapes is not None:
        shapes.expect(own.values())
    recorder = Recorder(written, names, shapes, before)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluation_mode(model))
        if training:
            model.train()
        if on != "real":
            stack.enter_context(one_thread())
            stack.enter_context(forgetful(model))
        if on == "fake":
            stack.enter_context(_quiet())
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            inputs = tree_map_only(Tensor, mode.from_tensor, inputs)
            stack.enter_context(mode)
        stack.enter_context(_DispatchWatcher(recorder))
        stack.enter_context(_module_names(model, recorder))
        if shapes is not None:
            inputs = tree_map_only(Tensor, shapes.ignore, inputs)
        stack.enter_context(recorder)
        try:
            output = call_model(model, inputs)
        except Exception as error:
            failing = recorder.failing
            last = failing[1] if failing is not None and failing[0] is error else None
            raise DoesNotRun(inputs, error, written, last) from error
    written.outputs = [recorder.number(x) for x in tensors_in(output)]
    return written


def _held_by(module: nn.Module) -> list[Tensor]:
    """Tensors that a module keeps on itself, in lists or dicts or alone."""
    kinds = (Tensor, list, tuple, dict)
    own = [v for k, v in vars(module).items() if k not in _ROOM and isinstance(v, kinds)]
    return tensors_in([own, module._buffers])


def record(
    model: nn.Module,
    inputs: Inputs,
    on: Ran | None = None,
    spare: bool = False,
    training: bool = False,
    before: Record | None = None,
    forms: Forms | None = None,
) -> Record:
    """Run `model` once on `inputs` and return what it called.

    Shapes alone cost milliseconds whatever the size; a network whose control flow looks at values
    is run for real instead. `on` asks for one way. A `spare` model was made to be recorded: what
    its forward keeps on `self` may stay there, and only such a one may be recorded in `training`
    mode. Calls that fail give what they gave `before`; `forms` are those of a run before.
    """
    ways: tuple[Ran, ...] = ("meta", "fake", "real") if on is None else (on,)
    call: Given | None = None
    for way in ways:
        if way == "fake" and call is not None and _fails_on_fakes(call, device_of(model)):
            continue
        try:
            kept = spare and way == ways[-1]
            return _run(model, inputs, way, kept, training, before, forms)
        except Exception as error:
            if way == ways[-1]:
                raise _explained(inputs, error) from error
            call = error.call if isinstance(error, DoesNotRun) else None
    raise AssertionError  # the last way returns or raises


def _fails_on_fakes(call: Given, device: torch.device) -> bool:
    """Whether a call that failed on shapes also fails on fake tensors, as the whole run would."""
    func, args, kwargs = call
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(x: Tensor) -> Tensor:
        place = device if x.is_meta else x.device
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=place)

    with _quiet(), torch.no_grad(), mode:
        try:
            args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
            func(*args, **kwargs)
        except Exception:
            return True
    return False


class DoesNotRun(LbylError):
    """The model failed on its inputs; `record` holds the calls up to there.

    `call` is the one that failed, None where the code around calls did.
    """

    def __init__(
        self, inputs: Inputs, error: Exception, record: Record, call: Given | None = None
    ) -> None:
        super().__init__(
            f"the model does not run on the example inputs ({described(inputs)}): {error}. "
            "Pass inputs as the model's forward takes them: a tensor, a tuple or a dict."
        )
        self.record = record
        self.call = call


def _explained(inputs: Inputs, error: Exception) -> DoesNotRun:
    return error if isinstance(error, DoesNotRun) else DoesNotRun(inputs, error, Record())
