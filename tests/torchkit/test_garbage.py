"""Old objects are not looked through inside, new ones are, and all are again afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from lbyl.torchkit.garbage import old_objects_aside


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_cycles_made_inside_are_found_and_older_ones_after_the_end() -> None:
    old = Cycle()
    with old_objects_aside():
        seen, new = weakref.ref(old), Cycle()
        seen_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert seen_new() is None and seen() is not None
        with old_objects_aside():  # nothing happens at the end of an inner one
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert seen() is None


def test_everything_is_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), old_objects_aside():
        raise ValueError("inside")
    assert gc.get_freeze_count() == 0


def test_whoever_has_set_objects_aside_finds_them_so() -> None:
    gc.freeze()
    try:
        with old_objects_aside():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
