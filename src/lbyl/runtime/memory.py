"""How much memory is free, of a device or of the machine, and what fits into it at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

ROOM = 1 << 27  # numbers in all matrices that are solved at once,
BYTES = 64  # of which each may take so many of what is free: there are several, in float64
FILLED = 0.7  # of the largest that smaller ones are filled up to


UNKNOWN = 1 << 60  # bytes that a machine counts as having that does not tell


def free_bytes(device: torch.device) -> int:
    """Of a CUDA device, with what torch holds of it and does not use, or of the machine."""
    if device.type != "cuda":
        return min(_of_machine(Path("/proc/meminfo")), _of_container(Path("/sys/fs/cgroup")))
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def _of_machine(told: Path) -> int:
    """What Linux says can be had without swapping."""
    try:
        line = next(x for x in told.read_text().splitlines() if x.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration, ValueError, IndexError):
        return UNKNOWN


def _of_container(told: Path) -> int:
    """What a control group may still take; files that it has read give way."""
    try:
        most, now = ((told / f"memory.{word}").read_text().strip() for word in ("max", "current"))
        rows = (line.split() for line in (told / "memory.stat").read_text().splitlines())
        files = sum(int(number) for name, number in rows if name == "inactive_file")
        return max(0, int(most) - int(now) + files)
    except (OSError, ValueError):  # there is none, or it has no limit
        return UNKNOWN


def in_chunks(sizes: Mapping[int, int], device: torch.device) -> Iterator[list[int]]:
    """Problems, given with how many rows they keep, in groups that fit and are not filled much."""
    room = ROOM if device.type != "cuda" else min(ROOM, free_bytes(device) // BYTES)
    some: list[int] = []
    for number in sorted(sizes, key=lambda n: -sizes[n]):
        largest = sizes[some[0]] if some else 0
        full = (len(some) + 1) * largest**2 > room
        if some and (full or sizes[number] < FILLED * largest):
            yield some
            some = []
        some.append(number)
    if some:
        yield some


def alike_in_chunks(
    kinds: Sequence[Hashable], sizes: Sequence[int], device: torch.device
) -> Iterator[list[int]]:
    """Numbers of problems of one kind, each given with how many rows it keeps, in such groups."""
    alike: dict[Hashable, dict[int, int]] = {}
    for number, (kind, size) in enumerate(zip(kinds, sizes)):
        alike.setdefault(kind, {})[number] = size
    for some in alike.values():
        yield from in_chunks(some, device)
