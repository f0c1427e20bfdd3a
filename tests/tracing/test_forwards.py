"""Networks that look at values, remember, view, copy in ways of their own: cut all the same."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.networks import randomise

IMAGE = torch.zeros(1, 3, 10, 10)


@lru_cache(maxsize=8)
def positions(size: int, device: torch.device) -> Tensor:
    """Remembered, for all networks."""
    return torch.arange(size, device=device).double()


def changed(m: Any, x: Tensor) -> Tensor:
    constant = torch.ones(2)
    shared = constant[:1]
    constant += 1
    return shared


LOOKED: dict[str, Callable[[Any, Tensor], Any]] = {
    "constants": lambda m, x: torch.tensor(2) + 1,
    "kept constants": lambda m, x: next(iter(m.strides.flip(0))) / 2,
    "sizes": lambda m, x: len(torch.arange(9, device=x.device)[::2].nonzero()),
    "numbers": lambda m, x: len(x.new_full((3, 1), m.strides[0])),
    "changed constants": changed,
    "buffers": lambda m, x: m.held[0],
    "values": lambda m, x: x.sum().abs() + 1,
    "what is remembered": lambda m, x: positions(4, x.device).sum(),
}


class Looking(nn.Module):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.first, self.second, self.at = nn.Linear(4, 6), nn.Linear(6, 2), at
        self.strides = torch.tensor([2.0, 4.0])
        self.register_buffer("held", torch.tensor([2.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second((self.first(x) * int(LOOKED[self.at](self, x))).relu())
        return out


@pytest.mark.parametrize("at", LOOKED)
def test_networks_that_look_at_numbers_are_cut_exactly(at: str) -> None:
    model, x = randomise(Looking(at)).double(), torch.randn(5, 4).double()
    model.strides = torch.tensor([2.0, 4.0])
    plan = lbyl.Plan({"first": torch.tensor([0, 2, 5])}, {"first": 6})
    slim = lbyl.compress(model, x[:2], plan, method="none").model
    silent = copy.deepcopy(model)
    silent.second.weight.data[:, [1, 3, 4]] = 0
    assert torch.allclose(slim(x), silent(x), atol=1e-12)
    assert torch.equal(model.strides, torch.tensor([2.0, 4.0]))
    assert positions(4, x.device).tolist() == [0, 1, 2, 3]


class Viewing(nn.Module):
    """Gives its features as vectors, in ways that some layouts of memory do not allow."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.conv, self.how = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), how
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4 * 36, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, conv, norm, head = self.first, self.conv, self.norm, self.head
        x = F.relu(first(x))
        if self.how == "by name":
            x = F.conv2d(input=x, weight=conv.weight, bias=conv.bias)
            own = {"running_var": norm.running_var, "running_mean": norm.running_mean}
            x = F.batch_norm(x, **own, bias=norm.bias, weight=norm.weight)
            return F.linear(weight=head.weight, input=x.flatten(1), bias=head.bias)
        x = norm(conv(x))
        if self.how == "view":
            return head(x.view(len(x), -1))
        if self.how == "by hand":
            return head(x.as_strided((len(x), 4 * 36), (4 * 36, 1)))
        return head(x.flatten(1))


@pytest.mark.parametrize("how", ["view", "by hand", "by name"])
def test_one_network_written_in_other_words_comes_out_the_same(how: str) -> None:
    made = []
    for way in ("flatten", how):
        model, keep = randomise(Viewing(way)).double(), ["first"]
        x, before = IMAGE.double(), copy.deepcopy(model.state_dict())
        prepared = lbyl.prepare(model, x, include=keep, data=64)
        made.append(prepared.compress(0.5, criterion="l2", refine=3).model)
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    for (name, a), b in zip(made[0].state_dict().items(), made[1].state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


class Counting(nn.Module):
    """Does something of its own when it is copied."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        twin = Counting()
        twin.copies = self.copies + 1
        return twin


class Odd(nn.Module):
    """Shares a layer and a parameter, keeps modules and itself in a list, has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.tied = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(6, 4)
        self.again, self.tied.weight = self.one, self.one.weight
        self.norm, self.counting = nn.BatchNorm1d(4), Counting()
        self.listed = [self.one, (self.norm, {"self": self})]
        self.one.register_forward_hook(self.look)

    def look(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.norm(self.again(x) + self.tied(x))


def test_a_slim_network_shares_within_itself_what_the_original_does_and_nothing_with_it() -> None:
    model, x = randomise(Odd()), torch.randn(5, 4)
    plan = lbyl.Plan({"first": torch.tensor([0, 2, 5])}, {"first": 6})
    limits = gc.get_threshold()
    slim: Any = lbyl.compress(model, x, plan, method="none").model
    assert gc.get_threshold() == limits
    assert slim.again is slim.one and slim.tied.weight is slim.one.weight
    assert slim.listed[0] is slim.one and slim.listed[1][0] is slim.norm
    assert slim.listed[1][1]["self"] is slim and slim.counting.copies > 0
    assert [hook.__self__ for hook in slim.one._forward_hooks.values()] == [slim]
    mine = {*model.modules(), *model.parameters(), *model.buffers()}
    assert not mine & {*slim.modules(), *slim.parameters(), *slim.buffers()}
    model.one.weight.data[:, [1, 3, 4]] = 0
    assert torch.allclose(slim(x), model(x), atol=1e-6)
