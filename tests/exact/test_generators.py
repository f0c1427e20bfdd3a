"""The global random generators are the host's: no network that draws nothing moves one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.rivals.errors import layer_errors

Draw = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two convolutions and a head, with what `draw` makes in between."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3), nn.Linear(12, 5)
        self.drop, self.noisy, self.draw = nn.Dropout(), nn.RReLU(), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.noisy(self.drop(self.draw(F.relu(self.a(x)))))
        h = F.scaled_dot_product_attention(h, h, h)
        return self.head(F.relu(self.b(h)).mean((2, 3)))


DRAWS: dict[str, Draw] = {
    "torch": lambda h: h + 0.01 * torch.randn_like(h),
    "torch in place": lambda h: h + 0.01 * torch.empty(1).uniform_(),
    "dropout": lambda h: F.dropout(h, 0.1),
    "numpy": lambda h: h + 0.01 * float(np.random.rand()),
    "python": lambda h: h + 0.01 * random.random(),
}


def build(draw: Draw = lambda h: h) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = Net(draw).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(4, 3, 16, 16, generator=generator)


def states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), *rest


VERBS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "trace": lambda m, x: lbyl.trace(m, x),
    "compress": lambda m, x: lbyl.compress(m, x, 0.5, data=8),
    "refine": lambda m, x: lbyl.refine(m, x, lbyl.compress(m, x, 0.5, method="none"), 2, data=8),
    "estimate": lambda m, x: lbyl.estimate(m, x, [0.5], data=8),
    "budget": lambda m, x: lbyl.compress(m, x, lbyl.Budget(macs=0.6), data=8),
    "layer errors": lambda m, x: layer_errors(lbyl.prepare(m, x, data=8), [0.5]),
    "random": lambda m, x: lbyl.compress(m, x, 0.5, criterion="random", method="none"),
    "fold": lambda m, x: lbyl.compress(m, x, 0.5, method="fold"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_moves_a_generator(verb: str) -> None:
    model, x = build()
    before = states()
    VERBS[verb](model, x)
    assert states() == before


@pytest.mark.parametrize("name", DRAWS)
def test_a_network_that_draws_leaves_the_generators_as_they_were(name: str) -> None:
    model, x = build(DRAWS[name])
    before = states()
    made = [lbyl.compress(model, x, 0.5, data=8).model.state_dict() for _ in range(2)]
    assert states() == before
    assert all(torch.equal(value, made[1][n]) for n, value in made[0].items())


@pytest.mark.parametrize("name", [None, *DRAWS])
@pytest.mark.parametrize("after", [0, 3])
def test_an_error_leaves_the_generators_as_they_were(name: str | None, after: int) -> None:
    runs = []

    def failing(h: Tensor) -> Tensor:
        runs.append(1)
        if name is not None:
            h = DRAWS[name](h)
        if len(runs) > after:
            raise RuntimeError("no more")
        return h

    model, x = build(failing)
    before = states()
    with pytest.raises(lbyl.LbylError):
        lbyl.compress(model, x, 0.5, data=8)
    assert states() == before


@pytest.mark.parametrize("verb", ["trace", "compress", "refine"])
def test_no_number_of_another_thread_repeats(verb: str) -> None:
    model, x = build()
    lbyl.trace(model, x)  # what is imported when first used
    drawn: list[tuple[float, float, float]] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            drawn.append((float(torch.rand(()).double()), random.random(), np.random.rand()))
            stop.wait(0.0005)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        VERBS[verb](model, x)
    finally:
        stop.set()
        thread.join()
    by_generator = [list(numbers) for numbers in zip(*drawn)]
    assert len(drawn) > 5
    # torch gives one of 2**24 numbers, of which few hundreds seldom meet, but not never.
    assert len(by_generator[0]) - len(set(by_generator[0])) <= 1
    for numbers in by_generator[1:]:
        assert len(set(numbers)) == len(numbers)
