"""Copies are what `copy.deepcopy` makes, by a shorter way."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lbyl.torchkit.copies import copied, deep_copy, is_ordinary


class Counting(nn.Module):
    """Does something of its own when it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        twin = Counting()
        twin.copies = self.copies + 1
        return twin


class Odd(nn.Module):
    """Shares a layer and a parameter, keeps modules and itself in a list, has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3)
        self.again = self.one
        self.tied = nn.Conv2d(3, 4, 3)
        self.tied.weight = self.one.weight
        self.norm = nn.BatchNorm2d(4)
        self.counting = Counting()
        self.listed = [self.one, (self.norm, {"self": self})]
        self.sizes: Any = {"kernel": (3, 3), "names": ["a", "b"]}
        self.one.register_forward_hook(self.look)

    def look(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.one(x) + self.tied(x))


def test_a_copy_shares_within_itself_what_the_original_does_and_nothing_with_it() -> None:
    model = Odd().eval()
    twin: Any = deep_copy(model, {})
    assert type(twin) is Odd
    assert twin.again is twin.one and twin.tied.weight is twin.one.weight
    assert twin.listed[0] is twin.one and twin.listed[1][0] is twin.norm
    assert twin.listed[1][1]["self"] is twin
    assert twin.sizes == model.sizes and twin.sizes["names"] is not model.sizes["names"]
    mine = {*model.modules(), *model.parameters(), *model.buffers()}
    assert not mine & {*twin.modules(), *twin.parameters(), *twin.buffers()}
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(model(x), twin(x))
    twin.one.weight.data.zero_()
    assert float(model.one.weight.abs().sum()) > 0


def test_a_hook_of_the_copy_is_bound_to_the_copy() -> None:
    model = Odd()
    twin: Any = deep_copy(model, {})
    (hook,) = twin.one._forward_hooks.values()
    assert hook.__self__ is twin


def test_a_class_that_copies_in_its_own_way_is_asked() -> None:
    model = Odd()
    twin: Any = deep_copy(model, {})
    assert twin.counting.copies == copy.deepcopy(model).counting.copies == 1
    assert not is_ordinary(Counting)
    assert is_ordinary(Odd) and is_ordinary(nn.Conv2d) and is_ordinary(nn.BatchNorm2d)


def test_what_stands_instead_of_a_tensor_is_in_every_place_of_it() -> None:
    model = Odd()
    other = nn.Parameter(torch.zeros(1))
    twin: Any = copied(model, {id(model.one.weight): other})
    assert twin.one.weight is other and twin.tied.weight is other


def test_a_tensor_that_a_forward_left_behind_is_copied_by_value() -> None:
    model: Any = nn.Linear(2, 2)
    model.kept = [model(torch.ones(1, 2))]
    twin: Any = deep_copy(model, {})
    assert torch.equal(twin.kept[0], model.kept[0]) and twin.kept[0].grad_fn is None
