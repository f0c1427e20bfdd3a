"""What is done at once fits, and is alike."""

from __future__ import annotations

import pytest
import torch

from lbyl.torchkit import memory
from lbyl.torchkit.memory import in_chunks

CPU = torch.device("cpu")


def test_chunks_hold_every_problem_once_and_no_more_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "ROOM", 5 * 100**2)
    sizes = dict(enumerate([100, 95, 90, 60, 55, 100, 10, 99, 98, 97]))
    chunks = list(in_chunks(sizes, CPU))
    assert sorted(i for chunk in chunks for i in chunk) == sorted(sizes)
    for chunk in chunks:
        largest = max(sizes[i] for i in chunk)
        assert len(chunk) * largest**2 <= 5 * 100**2
        assert min(sizes[i] for i in chunk) >= memory.FILLED * largest
