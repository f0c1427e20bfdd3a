"""What belongs to the caller and is shared by all threads of a process: left as it was found.

torch keeps its random state, its number of threads and the hooks of all modules once for a process.
Several compressions may run in threads of their own: the first that changes something remembers how
it was, the last one puts it back, and hooks look on in their own thread only.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_lock = threading.Lock()
_here = threading.local()


DRAWING = (  # functions that take a generator
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"),
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"),
)
GENERATORS = ("torch", "python", "numpy")  # that a process has once for all


class _Shared:
    """How many threads are inside, and what was found by the first."""

    def __init__(self) -> None:
        self.drawing = dict.fromkeys(GENERATORS, 0)
        self.found = {name: ExitStack() for name in GENERATORS}  # which puts back what was
        self.devices: list[int] = []  # whose random state was remembered
        self.busy = 0
        self.threads = 1
        self.remembering = 0  # in torch 2.4


_shared = _Shared()


@contextmanager
def one_thread() -> Iterator[None]:
    """Without torch's threads: following shapes and labels is thousands of tiny operations.

    Threads gain nothing there, and on a busy machine each would wait for the other.
    """
    with _lock:
        before = torch.get_num_threads()
        if _shared.busy and before == 1:  # a thread that torch first sees now gets the other's 1
            before = _shared.threads
        _shared.busy, _shared.threads = _shared.busy + 1, before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _shared.busy -= 1
        torch.set_num_threads(before)


def threads_for(device: torch.device) -> AbstractContextManager[None]:
    """One thread where a device does the work: what is left to the processor are indices."""
    return nullcontext() if device.type == "cpu" else one_thread()


@contextmanager
def own_randomness(names: Collection[str] = GENERATORS) -> Iterator[None]:
    """Networks that draw from these global generators draw the same every time, and put them back.

    The first of all threads remembers the state, the last one puts it back; `begin_again` seeds
    inside. Where no names are given nothing is touched: what else is drawn has a generator of its
    own.
    """
    outside: frozenset[str] = getattr(_here, "draws", frozenset())
    new = [name for name in GENERATORS if name in names and name not in outside]
    with _lock:
        for name in new:
            if not _shared.drawing[name]:
                _remember(name, _shared.found[name])
            _shared.drawing[name] += 1
    _here.draws = outside | set(new)
    begin_again()
    try:
        yield
    finally:
        _here.draws = outside
        with _lock:
            for name in new:
                _shared.drawing[name] -= 1
                if not _shared.drawing[name]:
                    _shared.found[name].close()


def _remember(name: str, into: ExitStack) -> None:
    """A generator's state, to be put back when the stack is closed."""
    if name == "torch":
        initialised = torch.cuda.is_initialized()
        _shared.devices = list(range(torch.cuda.device_count())) if initialised else []
        into.enter_context(torch.random.fork_rng(devices=_shared.devices))
    elif name == "python":
        into.callback(random.setstate, random.getstate())
    elif "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        into.callback(numpy.random.set_state, numpy.random.get_state())


def begin_again(seed: int = 0) -> None:
    """Seed the generators whose state is remembered; what is being recorded draws as it will."""
    draws: frozenset[str] = getattr(_here, "draws", frozenset())
    if "python" in draws:
        random.seed(seed)
    if "numpy" in draws and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in draws:
        torch.default_generator.manual_seed(seed)
        if _shared.devices and not torch.cuda.is_current_stream_capturing():
            for device in _shared.devices:
                torch.cuda.default_generators[device].manual_seed(seed)


class OwnDraws(TorchFunctionMode):
    """Inside a `with` what is drawn by torch in this thread has a generator of its own.

    It is for building networks, whose first weights are drawn; what takes no generator draws from
    the global one as ever.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        drawing = getattr(func, "__name__", "") in DRAWING and kwargs.get("generator") is None
        on_processor = not any(isinstance(x, torch.Tensor) and not x.is_cpu for x in args)
        if drawing and on_processor and str(torch.get_default_device()) == "cpu":
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


@contextmanager
def module_hooks(
    after: Callable[..., None], before: Callable[..., None] | None = None, always: bool = False
) -> Iterator[None]:
    """Calls around every module that runs in this thread; nothing is registered on a model.

    `before` gets (module, args); `after` gets (module, args, output), or where it is called
    `always`, also after an error, (module, args, kwargs, output).
    """
    thread = threading.get_ident()

    def only_here(call: Callable[..., None]) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            if threading.get_ident() == thread:
                call(*args)

        return hook

    torch_modules: Any = nn.modules.module
    register = torch_modules.register_module_forward_hook
    told = "with_kwargs" in inspect.signature(register).parameters
    with ExitStack() as stack:
        if told:
            handles = [register(only_here(after), with_kwargs=always, always_call=always)]
        else:
            after = stack.enter_context(_keywords_added(after)) if always else after
            handles = [register(only_here(after), always_call=always)]
        if before is not None:
            handles.append(torch_modules.register_module_forward_pre_hook(only_here(before)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
                if told:  # torch forgets to: `torch.compile` would warn of a hook long gone
                    torch_modules._global_forward_hooks_with_kwargs.pop(handle.id, None)


@contextmanager
def _keywords_added(after: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """For torch 2.4 and others that do not tell such hooks of keywords: a hook that knows them.

    As in later versions it gets no keywords after an error.
    """

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kwargs, handled = _here.calls[-1]
        failed = sys.exc_info()[1] is not handled  # torch calls it while it handles the error
        after(module, args, output) if failed else after(module, args, kwargs, output)

    with _lock:
        _shared.remembering += 1
        nn.Module._call_impl = _remembered_call  # type: ignore
    try:
        yield hook
    finally:
        with _lock:
            _shared.remembering -= 1
            if not _shared.remembering:
                nn.Module._call_impl = _call  # type: ignore[method-assign]


_call = nn.Module._call_impl


def _remembered_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of a module whose keywords, and the error handled meanwhile, are remembered."""
    calls = _here.__dict__.setdefault("calls", [])
    calls.append((kwargs, sys.exc_info()[1]))
    try:
        return _call(module, *args, **kwargs)
    finally:
        calls.pop()
