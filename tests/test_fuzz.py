"""Random networks: `make fuzz` asks the same of thousands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lbyl
from support.fuzz.architectures import USUAL, draw
from support.fuzz.parts import PARTS
from support.fuzz.promises import Broken, check, distance, run, silenced, unchanged
from support.fuzz.unusual import GROUPS, UNUSUAL

FIRST, NETWORKS, AT_ONCE = 100_000, 200, 20  # seeds that `make fuzz` does not come to
STARTS = range(FIRST, FIRST + NETWORKS, AT_ONCE)
BATCHES = [pytest.param(n, marks=pytest.mark.slow if i > 1 else ()) for i, n in enumerate(STARTS)]
# A layer that reads some channels of a unit and makes others of it; sizes that fit without data;
# inputs that never vary.
ONCE_BROKEN = (4412, 663, 3554)


@pytest.mark.parametrize("first", BATCHES)
def test_random_networks_keep_every_promise(first: int) -> None:
    broken = {}
    for seed in range(first, first + AT_ONCE):
        try:
            check(seed)
        except Exception as error:  # all of them are told, not only the first
            broken[f"python scripts/fuzz.py --count 1 --first {seed}"] = repr(error)
    assert not broken


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_a_network_that_was_once_broken_keeps_every_promise(seed: int) -> None:
    check(seed, without=USUAL)


def test_a_seed_is_a_network() -> None:
    for seed in (3, 4):
        one, two = draw(seed), draw(seed)
        assert repr(one.model) == repr(two.model)
        assert all(map(torch.equal, run(one.model, one.each[0]), run(two.model, two.each[0])))
    assert repr(draw(3).model) != repr(draw(4).model)


def test_every_part_is_drawn_somewhere() -> None:
    found = {type(m).__name__ for seed in range(120) for m in draw(seed).model.modules()}
    wanted = "Conv1d Conv2d Conv3d ConvTranspose2d Linear LSTM GRU MultiheadAttention Embedding"
    wanted += " Attention Twice Functional InPlace Gated Selected Broadcast Tokens BatchNorm3d"
    assert not set(wanted.split()) - found
    assert len(PARTS) > 20


def test_unusual_parts_are_drawn_and_can_be_left_out() -> None:
    found = {name for seed in range(150) for name in draw(seed).elements}
    assert {name.split()[0] for name in found & set(UNUSUAL)} == set(GROUPS)
    for seed in range(20):
        some = draw(seed, without={"width", "path"}).elements
        assert some == tuple(
            n for n in draw(seed).elements if n.split()[0] not in {"width", "path"}
        )
        assert not set(draw(seed, without=USUAL).elements) & set(UNUSUAL)


class Wrong(nn.Module):
    """Counts how often it runs, and draws a random number each time."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + torch.rand(())


@pytest.mark.parametrize(("attribute", "what"), [("runs", "given model"), ("none", "random state")])
def test_what_changes_is_noticed(attribute: str, what: str) -> None:
    model = Wrong()
    with pytest.raises(Broken, match=what), unchanged(model):
        setattr(model, attribute, 1) if attribute == "runs" else torch.rand(())


def test_silencing_a_channel_changes_what_reads_it() -> None:
    """The reference of the fuzzer is no copy of the original."""
    seed = next(s for s in range(50) if lbyl.trace(*_parts(s)).units)
    drawn = draw(seed)
    graph = lbyl.trace(drawn.model, drawn.inputs)
    plan = lbyl.Prepared(drawn.model, drawn.inputs, graph).plan({"*": 0.5}, method="none")
    quiet = silenced(drawn.model, graph, plan)
    assert distance(run(quiet, drawn.each[0]), run(drawn.model, drawn.each[0])) > 1e-3


def _parts(seed: int) -> tuple[nn.Module, object]:
    drawn = draw(seed)
    return drawn.model, drawn.inputs
