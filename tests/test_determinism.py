"""The same question gives the same bits, and nothing of the caller's is touched on the way."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support import quick
from support.fuzz.promises import surroundings, unchanged
from support.networks import build, example

BETWEEN_THREADS = 1e-4  # of the largest entry of a tensor, stated in docs/reliability.md


def state_of(name: str) -> dict[str, Tensor]:
    return quick.compress(build(name), example(name), {"*": 0.5}, criterion="l2").model.state_dict()


def same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("method", lbyl.methods.names())
def test_the_same_seed_gives_the_same_bits_whatever_the_caller_draws(method: str) -> None:
    models = []
    for draw in (1, 2):
        torch.manual_seed(draw)
        random.seed(draw)
        models.append(quick.compress(build("basic"), example("basic"), 0.5, method=method).model)
    assert same_bits(models[0].state_dict(), models[1].state_dict())


def test_another_seed_gives_other_bits() -> None:
    one, two = (
        quick.compress(build("chain"), example("chain"), {"*": 0.5}, criterion="l2", seed=seed)
        for seed in (0, 1)
    )
    assert not same_bits(one.model.state_dict(), two.model.state_dict())


class Drawing(nn.Module):
    """Draws numbers in evaluation, too; `fails` in the large batches of a collection."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner, self.fails = build("chain"), fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and len(x) > 4:
            raise RuntimeError("out of memory")
        return self.inner(F.dropout(x, 0.1 + 0.2 * random.random(), training=True))


def test_a_network_that_draws_numbers_draws_none_of_the_callers() -> None:
    states = []
    for _ in range(2):
        model = Drawing()
        with unchanged(model):
            states.append(quick.compress(model, example("chain"), {"*": 0.5}).model.state_dict())
        torch.rand(3)
    assert same_bits(*states)


def test_names_are_imported_without_drawing_from_the_callers_numbers() -> None:
    """In a process of its own: packages that draw do so when they are first imported."""
    program = (
        "import random, lbyl; before = random.getstate(); lbyl.compress; lbyl.methods; lbyl.load; "
        "assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_settings_and_random_states_are_the_callers_after_an_error() -> None:
    model = Drawing(fails=True)
    with unchanged(model), pytest.raises(Exception, match="out of memory"):
        quick.compress(model, example("chain"), 0.5)
    with unchanged(model), pytest.raises(lbyl.LbylError, match="does not run"):
        quick.compress(model, torch.zeros(1, 4, 8, 8), 0.5)


def test_settings_of_the_caller_are_kept_whatever_they_are() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad(), unchanged(model := build("chain")):
            before = surroundings()
            quick.compress(model, example("chain").double(), 0.5)
            assert surroundings() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_numbers_of_threads_differ_by_no_more_than_is_stated() -> None:
    states = []
    for count in (1, 2):
        with threads(count):
            states.append(state_of("dense"))
            assert torch.get_num_threads() == count
    for key, value in states[0].items():
        off = (value - states[1][key]).abs().max()
        assert off <= BETWEEN_THREADS * value.abs().max(), key


def together(*work: threading.Thread) -> None:
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()


def test_two_compressions_in_two_threads_do_not_disturb_each_other() -> None:
    names = ("basic", "dense")
    alone = {name: state_of(name) for name in names}
    found: dict[str, dict[str, Tensor]] = {}
    before = surroundings()

    def work(name: str) -> None:
        found[name] = state_of(name)

    together(*(threading.Thread(target=work, args=(name,)) for name in names))
    assert all(same_bits(alone[name], found[name]) for name in names)
    after = surroundings()
    assert after["threads"] == before["threads"] and after["hooks on all modules"] == 0
