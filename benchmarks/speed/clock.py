"""Seconds of wall and of processors, the device waited for; what a machine can do at best."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spent:
    """What one call took; processor time is of all threads, and others change it less."""

    wall: float
    processor: float


def spent(work: Callable[[], object], device: str) -> Spent:
    """Run once and wait for the device."""
    wait(device)
    wall, processor = time.perf_counter(), time.process_time()
    work()
    wait(device)
    return Spent(time.perf_counter() - wall, time.process_time() - processor)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def best(work: Callable[[], object], device: str, runs: int = 3) -> float:
    """Wall seconds of the fastest of a few runs, the first of which does not count."""
    work()
    return min(spent(work, device).wall for _ in range(runs))


def peak_bytes(device: str) -> int:
    """The most memory that was held at once: of the device, or of this process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class Rates:
    """Measured at best: products of matrices in both precisions, and reading memory."""

    float32: float  # floating-point operations a second
    float64: float
    bytes: float  # a second

    @classmethod
    def measured(cls, device: str) -> Rates:
        size = 8192 if device.startswith("cuda") else 1536
        single = torch.randn(size, size, device=device)
        double = single.double()
        large = torch.zeros(1 << (30 if device.startswith("cuda") else 26), device=device)
        return cls(
            2 * size**3 / best(lambda: single @ single, device),
            2 * size**3 / best(lambda: double @ double, device),
            8 * large.numel() / best(lambda: large.add_(1.0), device),  # read and written
        )
