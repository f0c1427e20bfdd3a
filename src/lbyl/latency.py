"""Timing of several models side by side.

What the design must satisfy: a machine's speed drifts, so models take turns instead of running
one after the other; the figure is a median with its interquartile range, so that one
hiccup changes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lbyl.errors import LbylError
from lbyl.runtime.run import Inputs, call_as_in_use, device_of, evaluation_mode

WARM_UP = 3
Key = TypeVar("Key", bound=Hashable)

Runner = Callable[[ExitStack, nn.Module, Inputs, "int | None"], Callable[[], object]]
RUNTIMES: dict[str, Runner] = {}
"""Name → what makes a function that runs a model there once; whoever knows a runtime adds it."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one pass."""

    median: float
    iqr: float  # between the quartiles
    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: list[float]) -> Timing:
        low, median, high = statistics.quantiles(runs, n=4, method="inclusive")
        return cls(median, high - low, tuple(runs))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.runs, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        return f"{1e3 * self.median:.2f} ms ± {1e3 * self.iqr:.2f}"


def compare(
    models: Mapping[str, nn.Module],
    example_inputs: Inputs,
    device: str | torch.device = "cpu",
    repeats: int = 20,
    threads: int | None = None,
    runtime: str = "pytorch",
) -> dict[str, Timing]:
    """Time every model on the same inputs, taking turns.

    `runtime` is "pytorch", or a name of `RUNTIMES`, which run on the CPU. The models given are put
    on `device` for the time of the measurement and then back.
    """
    if repeats < 2:
        raise LbylError("timing needs at least 2 repeats")
    target = torch.device(device)
    if runtime != "pytorch" and runtime not in RUNTIMES:
        raise LbylError(f"no runtime is named {runtime!r}: pytorch, {', '.join(RUNTIMES)}")
    if runtime != "pytorch" and target.type != "cpu":
        raise LbylError(f"{runtime} is timed on the CPU: leave the device out")
    inputs = tree_map_only(Tensor, lambda x: x.to(target), example_inputs)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(threads_of(threads))
        runners: dict[str, Callable[[], object]] = {}
        for name, model in models.items():
            if runtime != "pytorch":
                runners[name] = RUNTIMES[runtime](stack, model, inputs, threads)
            else:
                stack.enter_context(_ready(model, target))
                runners[name] = _runner(model, inputs)
        return take_turns(runners, target, repeats)


def take_turns(
    runners: Mapping[Key, Callable[[], object]], device: torch.device, repeats: int
) -> dict[Key, Timing]:
    """Time functions that run networks: after a warm-up each runs once in every turn."""
    for run in runners.values():
        for _ in range(WARM_UP):
            run()
    seconds: dict[Key, list[float]] = {name: [] for name in runners}
    order = list(runners)
    for turn in range(repeats):
        first = turn % len(order)  # nobody always runs right after the same other one
        for name in order[first:] + order[:first]:
            seconds[name].append(_time(runners[name], device))
    return {name: Timing.of(runs) for name, runs in seconds.items()}


def _time(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def _runner(model: nn.Module, inputs: Inputs) -> Callable[[], object]:
    return lambda: call_as_in_use(model, inputs)


@contextmanager
def _ready(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode on a device, undone afterwards."""
    home = device_of(model)
    model.to(device)
    try:
        with evaluation_mode(model):
            yield
    finally:
        model.to(home)


@contextmanager
def running(models: Iterable[nn.Module], threads: int | None = None) -> Iterator[None]:
    """Networks as they are run: evaluation mode, no gradients, so many threads."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(threads_of(threads))
        for model in models:
            stack.enter_context(evaluation_mode(model))
        yield


@contextmanager
def threads_of(count: int | None) -> Iterator[None]:
    """So many threads inside, where a number is given."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
