"""Freed memory stays with the process for a while, and goes back to the system afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lbyl.torchkit import heap
from lbyl.torchkit.heap import (
    AS_ALWAYS,
    FRUGAL,
    KEPT,
    keep_no_more,
    look_at_idle_memory,
    memory_kept,
    spare_memory,
)

PAGES = Path("/proc/self/statm")

needs_glibc = pytest.mark.skipif(
    not PAGES.is_file() or heap._library() is None, reason="needs Linux with glibc 2.33 or later"
)

SCRIPT = """
import json
from pathlib import Path
import torch
from lbyl.torchkit import heap

ROOM = 1 << 27
told = {}

def note(name):
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    told[name] = (4096 * pages - start) / ROOM

start = 4096 * int(Path("/proc/self/statm").read_text().split()[1])
with heap.memory_kept():
    torch.ones(ROOM // 4)
    note("kept")
note("given back")
with heap.memory_kept():
    torch.ones(ROOM // 4)
    heap.keep_no_more()
    note("no more")
    torch.ones(ROOM // 4)
    note("no more, again")
with heap.memory_kept():
    heap.spare_memory()
    made = [torch.ones(ROOM // 64) for _ in range(16)]  # of 8 MB, which glibc would keep
    smaller = [torch.ones(64) for _ in range(1000)]  # behind them
    del made
    heap.look_at_idle_memory()
    note("sparing")
idle = heap._idle_bytes()
heap.free_bytes = lambda device: heap.PART * (idle + ROOM)
with heap.memory_kept():
    torch.ones(ROOM // 8)
    heap.look_at_idle_memory()
    note("little idle")
    torch.ones(ROOM // 2)
    heap.look_at_idle_memory()
    note("much idle")
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def resident() -> dict[str, float]:
    """Memory of a process of its own, above the start, in multiples of a large tensor's."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """What the C library is told, instead of telling it."""
    made: list[dict[int, int]] = []
    monkeypatch.setattr(heap, "_set", made.append)
    return made


@needs_glibc
def test_a_large_tensor_leaves_its_memory_inside_and_the_system_has_it_back_afterwards(
    resident: dict[str, float],
) -> None:
    assert resident["kept"] > 0.9 and resident["given back"] < 0.5


@needs_glibc
def test_where_memory_is_short_none_is_kept_any_more(resident: dict[str, float]) -> None:
    assert resident["no more"] < 0.5 and resident["no more, again"] < 0.5


@needs_glibc
def test_where_memory_is_spared_no_large_block_stays(resident: dict[str, float]) -> None:
    assert resident["sparing"] < 0.2


@needs_glibc
def test_memory_is_spared_inside_only_and_settings_come_back(settings: list[object]) -> None:
    spare_memory()  # nobody is inside who would put them back
    assert settings == []
    with memory_kept():
        spare_memory()
        keep_no_more()
        spare_memory()
        assert settings == [KEPT, FRUGAL]
    assert settings == [KEPT, FRUGAL, AS_ALWAYS]


@needs_glibc
def test_no_more_lies_idle_than_a_part_of_what_was_free(resident: dict[str, float]) -> None:
    assert 0.4 < resident["little idle"] < 0.9  # half of what may lie idle
    assert resident["much idle"] < 0.4


@needs_glibc
def test_settings_are_made_once_and_come_back_after_an_error(settings: list[object]) -> None:
    with pytest.raises(ValueError, match="inside"), memory_kept():
        with memory_kept():  # the inner one changes nothing
            pass
        assert settings == [KEPT]
        raise ValueError("inside")
    assert settings == [KEPT, AS_ALWAYS]
    keep_no_more()  # nobody keeps any
    assert settings == [KEPT, AS_ALWAYS]


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_library", lambda: None)
    with memory_kept():
        look_at_idle_memory()
        keep_no_more()
        spare_memory()
        assert torch.ones(3).sum() == 3
