"""Full searches for cycles wait until the end, and are as they were afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from lbyl.torchkit.garbage import NEVER, young_objects_only


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_young_cycles_are_found_inside_and_settings_come_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="inside"), young_objects_only():
        assert gc.get_threshold() == (*before[:2], NEVER)
        with young_objects_only():  # the inner one changes nothing
            pass
        assert gc.get_threshold()[2] == NEVER
        new = Cycle()
        seen = weakref.ref(new)
        del new
        gc.collect(0)
        assert seen() is None
        raise ValueError("inside")
    assert gc.get_threshold() == before


def test_whatever_the_caller_has_set_comes_back() -> None:
    before = gc.get_threshold()
    gc.set_threshold(1000, 20, 30)
    try:
        with young_objects_only():
            pass
        assert gc.get_threshold() == (1000, 20, 30)
    finally:
        gc.set_threshold(*before)
