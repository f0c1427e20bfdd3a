"""Contexts of the whole process: the first enters, the last leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lbyl.torchkit.contexts import once_for_all

told: list[str] = []


@once_for_all
@contextmanager
def open_house() -> Iterator[None]:
    told.append("in")
    try:
        yield
    finally:
        told.append("out")


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    told.clear()


@open_house()
def visit() -> list[str]:
    return list(told)


def test_only_the_first_enters_and_only_the_last_leaves_also_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), open_house():
        assert visit() == ["in"]
        thread = threading.Thread(target=visit)
        thread.start()
        thread.join()
        assert told == ["in"]
        raise ValueError("inside")
    assert told == ["in", "out"]


def test_it_can_be_entered_again_and_decorates() -> None:
    assert visit() == ["in"]
    assert visit() == ["in", "out", "in"]
    assert told == ["in", "out"] * 2
