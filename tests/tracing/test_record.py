"""A recorded run: what it keeps alive, what it says of outputs, what training leaves behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.tracing.record import record  # private: how long activations live is seen inside alone


class Watched(nn.Module):
    """Notes at each layer how many activations live."""

    def __init__(self, noted: Callable[[int], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        made: list[weakref.ref[Tensor]] = []
        for layer in self.layers:
            x = layer(x).relu()
            made.append(weakref.ref(x))
            self.noted(sum(ref() is not None for ref in made))
        return x


def test_activations_live_no_longer_than_in_a_plain_run() -> None:
    living: list[int] = []
    found = record(Watched(living.append).eval(), torch.ones(1, 4))
    assert living == [1] * 8
    assert len({value for call in found.calls for value in call.outputs}) == 17  # each its own


class Looking(nn.Module):
    """Its output is as long as its constants or its values say."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.first, self.second, self.at = nn.Linear(4, 8), nn.Linear(8, 6), at
        self.strides = torch.tensor([2.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).relu())
        looked = {
            "nothing": lambda: h[:3],
            "constants": lambda: h[: int(self.strides[0])],
            "inputs": lambda: h[x[:, 0] > 0],
            "a constant beside values": lambda: h.new_full((2, 2), self.strides[0]),
            "indices": lambda: h[torch.tensor([0, 2])],
            "a decision": lambda: h[:2] if h.sum() > 0 else h,
            "numbers": lambda: h[: len(h.tolist())],
            "a mask": lambda: h[h[:, 0] > 0],
            "places": lambda: h[h[:, 0].nonzero()],
            "the best": lambda: h[h[:, 0].topk(2).indices],
        }[self.at]
        out: Tensor = looked()  # type: ignore[no-untyped-call]
        return out


SHAPED = ("nothing", "constants", "a constant beside values", "inputs", "indices", "the best")


@pytest.mark.parametrize("at", [*SHAPED, "a decision", "numbers", "a mask", "places"])
def test_shapes_of_outputs_are_known_where_no_computed_value_decides_on_them(at: str) -> None:
    torch.manual_seed(0)
    model, x = Looking(at).eval(), torch.randn(5, 4)
    (output,) = lbyl.trace(model, x).outputs
    assert output.shape == (tuple(model(x).shape) if at in SHAPED else None)
    assert output.dtype == torch.float32


class Aside(nn.Module):
    """A head of training only, behind a BatchNorm of one value, dropout and a count of runs."""

    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.pooled, self.aside = nn.BatchNorm2d(6), nn.Linear(6, 2)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = self.second(self.first(x).relu())
        if not self.training:
            return y.flatten(2).mean(2)
        self.runs += 1
        with torch.no_grad():
            self.pooled.weight.mul_(0.9)
        pooled = self.pooled(y.mean((2, 3), keepdim=True)).flatten(1)
        return self.aside(F.dropout(pooled, 0.5)) * torch.rand(1)


def test_the_run_in_training_mode_changes_neither_the_network_nor_random_numbers() -> None:
    model, x = Aside().train(), torch.randn(1, 3, 4, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    graph = lbyl.trace(model, x)
    assert graph.names == ["first"]
    assert graph.unprunable["aside"] == "it runs in training only"
    assert torch.equal(drawn, torch.get_rng_state()) and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
