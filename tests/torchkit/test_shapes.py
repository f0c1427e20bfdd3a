"""Runs for shapes alone: devices are told as in use, and nothing is left behind."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.torchkit.shapes import Shapes
from lbyl.tracing import record as recording
from lbyl.tracing.record import record


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_tensors_without_data_say_that_they_lie_where_they_stand_for(kind: str) -> None:
    with Shapes(torch.device(kind)):
        made = torch.ones(2, 3, device=kind)
        moved = made.to(kind).cpu()
        told = [made.device.type, made.is_cuda, moved.is_meta, torch.zeros(4).is_cpu]
    assert told == [kind, kind == "cuda", False, kind == "cpu"]
    assert made.is_meta and moved.is_meta and made.shape == (2, 3)


def test_a_tensor_changed_in_place_stays_itself() -> None:
    weight = torch.ones(3)
    with Shapes(torch.device("cpu")):
        assert weight.add_(1) is weight
    assert torch.equal(weight, torch.ones(3))


class Remembering(nn.Module):
    """Its positions come from a function that remembers them, for all networks of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    @staticmethod
    @lru_cache(maxsize=8)
    def positions(size: int, device: torch.device) -> Tensor:
        return torch.arange(size, device=device).float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x + self.positions(4, x.device)).relu())
        return out


def test_what_functions_came_to_remember_without_data_is_forgotten() -> None:
    model, x = Remembering().eval(), torch.ones(1, 4)
    graph = lbyl.trace(model, x)
    assert graph["first"].channels == 6
    expected = model.second(model.first(x + torch.arange(4)).relu())
    assert torch.equal(model(x), expected)


class Looking(nn.Module):
    """Goes by values, or by constants, if asked to."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.layer, self.at = nn.Linear(4, 4), at
        self.strides = torch.tensor([2.0, 4.0])
        self.register_buffer("held", torch.tensor([2.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        looked = {
            "nothing": lambda: 1,
            "constants": lambda: torch.tensor(2) + 1,
            "kept constants": lambda: next(iter(self.strides.flip(0))) / 2,
            "sizes": lambda: len(torch.arange(9, device=x.device)[::2].nonzero()),
            "numbers": lambda: len(x.new_full((3, 1), self.strides[0])),
            "changed constants": self.changed,
            "buffers": lambda: self.held[0],
            "chance": lambda: torch.rand(1) + 1,
            "values": lambda: x.sum() + 1,
        }[self.at]
        out: Tensor = self.layer(x) * int(looked())  # type: ignore[no-untyped-call]
        return out

    def changed(self) -> Tensor:
        constant = torch.ones(2)
        shared = constant[:1]
        constant += 1
        return shared


WAYS = {"nothing": "meta", "constants": "meta", "kept constants": "meta", "sizes": "meta"}
WAYS |= {"numbers": "meta", "changed constants": "real", "buffers": "real"}
WAYS |= {"chance": "real", "values": "real"}


@pytest.mark.parametrize(("at", "ran"), WAYS.items())
def test_a_network_runs_on_as_little_as_it_needs(at: str, ran: str) -> None:
    model = Looking(at)
    found = record(model, torch.ones(1, 4))
    assert found.ran == ran
    factor = next(c for c in found.calls if c.op in ("mul", "__mul__")).args[1]
    assert factor == {"constants": 3, "kept constants": 2, "sizes": 4, "numbers": 3}.get(at, factor)
    assert torch.equal(model.strides, torch.tensor([2.0, 4.0]))


@pytest.mark.parametrize(("at", "ways"), [("nothing", ["meta"]), ("values", ["meta", "real"])])
def test_a_run_on_fakes_is_left_out_where_the_call_that_failed_would_fail_again(
    at: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    run = recording._run

    def noted(model: nn.Module, inputs: Any, on: Any, *rest: Any) -> recording.Record:
        gone.append(on)
        return run(model, inputs, on, *rest)

    monkeypatch.setattr(recording, "_run", noted)
    record(Looking(at), torch.ones(1, 4))
    assert gone == ways


@torch.no_grad()
def test_fakes_are_told_by_trial_which_calls_they_cannot_make() -> None:
    x, device = torch.ones(2, 3, device="meta"), torch.device("cpu")
    fails = {f: recording._fails_on_fakes((f, (x,), {}), device) for f in (torch.relu, Tensor.t)}
    assert not any(fails.values())
    for func in (Tensor.item, torch.nonzero, Tensor.tolist):
        assert recording._fails_on_fakes((func, (x,), {}), device)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_sizes_that_do_not_fit_are_refused_without_data_as_with_it(dims: int) -> None:
    x, kernel = torch.zeros(2, 3, *[5] * dims), [2] * dims
    turned, plain = (getattr(F, f"{name}{dims}d") for name in ("conv_transpose", "conv"))
    cases = [
        lambda: turned(x, torch.zeros(4, 3, *kernel)),
        lambda: plain(x, torch.zeros(4, 3, *kernel), torch.zeros(5)),
    ]
    for case in cases:
        for way in (contextlib.nullcontext(), Shapes(torch.device("cpu"))):
            with pytest.raises(RuntimeError), way:
                case()
    with Shapes(torch.device("cpu")):
        assert turned(x, torch.zeros(3, 4, *kernel)).shape[1] == 4
        assert turned(x[0], torch.zeros(3, 4, *kernel), torch.zeros(4)).shape[0] == 4
