"""A width that `forward` reads as a number: what reads it is found, or the number stays right."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl

Reads = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Three layers; what `reads` computes with the first one's width lies behind it."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 32), nn.Linear(32, 10)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.reads(self, self.a(x).relu())).relu())


READS: dict[str, Reads] = {
    "shape": lambda net, h: h / h.shape[-1] ** 0.5,
    "size": lambda net, h: h / h.size(1),
    "number of entries": lambda net, h: h / h.numel(),
    "length": lambda net, h: h * len(h[0]),
    "tensor of a width": lambda net, h: h / torch.tensor(h.shape[1]),
    "filled with a width": lambda net, h: h / torch.full((), h.shape[1]),
    "in_features": lambda net, h: h * net.b.in_features**-0.5,
    "shape of a weight": lambda net, h: h * net.b.weight.shape[1] ** -0.5,
    "a branch at half": lambda net, h: 2 * h if h.shape[1] < 32 else h,
    "a branch near the whole": lambda net, h: 2 * h if h.shape[1] < 60 else h,
    "only few": lambda net, h: 2 * h if h.shape[1] < 12 else h,
    "index": lambda net, h: h + torch.arange(h.shape[1])[-1],
}


def build(reads: Reads) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(reads).eval(), torch.randn(5, 8)


def silenced(model: nn.Module, plan: lbyl.Plan) -> nn.Module:
    """The original whose next layer hears no pruned channel."""
    quiet = copy.deepcopy(model)
    after = {"a": "b", "b": "c"}
    with torch.no_grad():
        for name, kept in plan.kept.items():
            pruned = torch.ones(plan.channels[name], dtype=torch.bool)
            pruned[kept] = False
            quiet.get_submodule(after[name]).weight[:, pruned] = 0
    return quiet


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_a_width_read_as_a_number_gives_no_other_result(name: str, ratio: float) -> None:
    model, x = build(READS[name])
    result = lbyl.compress(model, x, ratio, method="none")
    reference = silenced(model, result.plan)
    torch.testing.assert_close(result.model(x), reference(x), rtol=1e-4, atol=1e-5)
    assert "network computes with its width" in result.graph.unprunable["a"]
    assert len(result.plan.kept["b"]) < 32


SLIGHT: dict[str, Reads] = {
    "cast to float": lambda net, h: (h * (1 + 1e-4 * h.shape[1])).float(),
    "cast by type": lambda net, h: (h.double() * (1 + 1e-4 * h.shape[1])).to(torch.float32),
    "made as float": lambda net, h: torch.stack(
        [h * (1 + 1e-4 * h.shape[1]), torch.zeros(h.shape)]
    ).sum(0),
    "one precision only": lambda net, h: (
        h * (1 + 1e-4 * h.shape[1]) if h.dtype == torch.float32 else h[:, :0]
    ),
    "a branch of large batches": lambda net, h: h / h.shape[1] if len(h) > 2 else h,
    "a mean over examples": lambda net, h: h - h.mean(0) * (h.shape[1] / 10) if len(h) > 3 else h,
}


@pytest.mark.parametrize("name", SLIGHT)
def test_what_a_width_changes_slightly_or_with_many_examples_is_found(name: str) -> None:
    model, x = build(SLIGHT[name])
    result = lbyl.compress(model, x, 0.5, method="none")
    torch.testing.assert_close(
        result.model(x), silenced(model, result.plan)(x), rtol=1e-4, atol=1e-5
    )
    assert list(result.plan.pruned) == ["b"]


def test_one_precision_and_several_examples_alone_leave_units_prunable() -> None:
    for reads in (
        lambda net, h: h.float().to(torch.float32),
        lambda net, h: h if h.dtype == torch.float32 else h[:, :0],
        lambda net, h: h - 0.1 * h.mean(0),
    ):
        assert lbyl.trace(*build(reads)).names == ["a", "b"]


def test_a_width_that_is_only_passed_on_is_pruned() -> None:
    model, x = build(lambda net, h: h.reshape(h.shape[0], 2, h.shape[1] // 2).flatten(1))
    assert lbyl.trace(model, x).names == ["a", "b"]
    assert lbyl.trace(*build(lambda net, h: h)).names == ["a", "b"]


def test_an_example_of_zeros_shows_it_too() -> None:
    model, x = build(READS["shape"])
    assert lbyl.trace(model, torch.zeros_like(x)).names == ["b"]


class Dead(nn.Module):
    """Four channels, of which two are dead, times their number."""

    def __init__(self, dead: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)
        with torch.no_grad():
            self.a.bias[list(dead)] = -100

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu() * len(self.a.weight))
        return out


@pytest.mark.parametrize("dead", list(itertools.combinations(range(4), 2)))
def test_a_width_is_found_whichever_channels_are_dead(dead: tuple[int, int]) -> None:
    assert "a" in lbyl.trace(Dead(dead).eval(), torch.rand(5, 6) + 1).unprunable


def test_a_network_that_draws_at_random_in_use_is_still_pruned() -> None:
    model, x = build(lambda net, h: F.dropout(h, 0.5, True))
    assert lbyl.trace(model, x).names == ["a", "b"]
    model, x = build(lambda net, h: F.dropout(h, 0.5, True) / h.shape[1])
    assert lbyl.trace(model, x).names == ["b"]


def test_a_width_that_only_the_plan_meets_is_left_alone() -> None:
    """No trial cut comes by exactly 48 channels."""
    model, x = build(lambda net, h: 2 * h if h.shape[1] == 48 else h)
    assert "a" in lbyl.trace(model, x).names
    result = lbyl.compress(model, x, 0.25, method="none")
    assert "a" not in result.plan.pruned
    reference = silenced(model, result.plan)
    torch.testing.assert_close(result.model(x), reference(x), rtol=1e-4, atol=1e-5)
    kept = {"a": torch.arange(48), "b": torch.arange(32)}
    with pytest.raises(lbyl.LbylError, match=r"cannot be carried out at a"):
        lbyl.compress(model, x, lbyl.Plan(kept, {"a": 64, "b": 32}), method="none")


class Attention(nn.Module):
    """An attention whose products are scaled by a number that `scale` reads."""

    def __init__(self, scale: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 3)
        self.heads, self.scale = 3, scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-2, -1) * self.scale(self, q)).softmax(-1)
        return self.head(x + self.out((weights @ v).transpose(1, 2).flatten(2)))


SCALES: dict[str, Callable[[Any, Tensor], float]] = {
    "out_features": lambda net, q: net.q.out_features**-0.5,
    "rows of a weight": lambda net, q: net.k.weight.shape[0] ** -0.5,
    "a constant": lambda net, q: 0.5,
}


@pytest.mark.parametrize("kind", ["heads", "qk"])
@pytest.mark.parametrize("name", SCALES)
def test_a_scale_of_attention_that_reads_a_width(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(SCALES[name]).double().eval(), torch.randn(2, 5, 6).double()
    graph = lbyl.trace(model, x, include=f"*:{kind}")
    if name != "a constant" and not graph.units:
        assert "network computes with its width" in graph.unprunable[f":{kind}"]
        return
    result = lbyl.prepare(model, x, include=f"*:{kind}").compress(
        {f"*:{kind}": 0.5}, method="none", criterion="random"
    )
    quiet = copy.deepcopy(model)
    (unit,) = result.graph.units
    kept = result.plan.kept[unit.name]
    with torch.no_grad():
        for layer in (quiet.q, quiet.k) if kind == "qk" else (quiet.q, quiet.k, quiet.v):
            rows = unit.local(result.graph.axes[f"{_name(quiet, layer)}.weight", 0])
            pruned = (rows >= 0) & ~torch.isin(rows, kept)
            layer.weight[pruned], layer.bias[pruned] = 0, 0
    torch.testing.assert_close(result.model(x), quiet(x), rtol=1e-9, atol=1e-9)


def _name(model: nn.Module, layer: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is layer)


class Swinlike(nn.Module):
    """Attention that hands weights on instead of calling its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.qkv, self.proj = nn.Linear(6, 12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.num_heads = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        b, n, c = x.shape
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias)
        q, k, v = qkv.reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        y = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)
        return F.linear(y, self.proj.weight, self.proj.bias)


def test_heads_whose_layers_are_not_called_are_not_masked() -> None:
    torch.manual_seed(0)
    model, x = Swinlike().eval(), torch.randn(2, 4, 6)
    graph = lbyl.trace(model, x, include="*:heads")
    assert not graph.units and ":heads" in graph.unprunable
