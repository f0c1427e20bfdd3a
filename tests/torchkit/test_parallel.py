"""Pieces of work side by side: the same answers, in order, and notes where they belong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lbyl.torchkit.fallbacks import note, noting
from lbyl.torchkit.parallel import each


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_answers_come_in_order_with_their_notes_and_errors() -> None:
    def square(x: Tensor) -> Tensor:
        note(f"{int(x)} was squared")
        assert torch.get_num_threads() == 1
        return x * x

    with noting() as notes:
        found = each(square, list(torch.arange(9)), torch.device("cpu"))
    assert [int(x) for x in found] == [n * n for n in range(9)]
    assert sorted(notes) == [f"{n} was squared" for n in range(9)]
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError):
        each(lambda n: 1 // n, [1, 0, 2], torch.device("cpu"))
