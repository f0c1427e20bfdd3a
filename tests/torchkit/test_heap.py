"""Freed memory stays with the process for a while, and goes back to the system afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lbyl.torchkit import heap
from lbyl.torchkit.heap import AS_ALWAYS, KEPT, keep_no_more, memory_kept

PAGES = Path("/proc/self/statm")
ROOM = 1 << 27  # bytes


def resident() -> int:
    return int(PAGES.read_text().split()[1]) * 4096


@pytest.mark.skipif(not PAGES.is_file() or heap._library() is None, reason="needs Linux with glibc")
def test_a_large_tensor_leaves_its_memory_inside_and_the_system_has_it_back_afterwards() -> None:
    before = resident()
    with memory_kept():
        torch.ones(ROOM // 4)
        inside = resident() - before
    assert inside > 0.9 * ROOM
    assert resident() - before < 0.5 * ROOM


def test_settings_are_made_once_and_come_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []
    monkeypatch.setattr(heap, "_set", made.append)
    monkeypatch.setattr(heap, "_give_back", lambda: made.append("back"))
    with pytest.raises(ValueError, match="inside"), memory_kept():
        with memory_kept():  # the inner one changes nothing
            pass
        assert made == [KEPT]
        raise ValueError("inside")
    assert made == [KEPT, AS_ALWAYS, "back"]


def test_where_memory_is_short_none_is_kept_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(heap, "_set", made.append)
    monkeypatch.setattr(heap, "_give_back", lambda: made.append("back"))
    keep_no_more()
    assert made == []  # nobody keeps any
    with memory_kept():
        keep_no_more()
        assert made == [KEPT, AS_ALWAYS, "back"]


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_library", lambda: None)
    with memory_kept():
        assert torch.ones(3).sum() == 3
