"""What was once wrong and must not be again."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.storage import MODEL, PLAN
from support import quick

IMAGE = torch.zeros(1, 3, 12, 12)


class Apart(nn.Module):
    """A consumer whose bias is added in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.conv = nn.Conv2d(3, 12, 3)
        self.mixed = nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        mixed, head = self.mixed, self.head
        if self.how == "together":
            return head(F.relu(mixed(x)).mean((2, 3)))
        x = F.conv2d(x, mixed.weight, None) + mixed.bias.view(1, -1, 1, 1)
        x = F.relu(x).mean((2, 3))
        if self.how == "linear":
            return F.linear(x, head.weight) + head.bias
        return x @ head.weight.t() + head.bias


@pytest.mark.parametrize("how", ["linear", "matmul"])
def test_a_bias_that_is_added_apart_is_moved_and_not_overwritten(how: str) -> None:
    images = torch.randn(64, 3, 12, 12)
    include = ("conv", "mixed") if how == "linear" else "conv"
    slim = {
        way: lbyl.compress(
            Apart(way), IMAGE, {"*": 0.5}, criterion="l2", data=images, include=include
        )
        for way in ("together", how)
    }
    together, apart = (slim[way].model(images) for way in ("together", how))
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)
    assert slim[how].corrections.mean == slim["together"].corrections.mean > 0


class Keeps(nn.Module):
    """Keeps a tensor on itself while it runs, and has a parameter that evaluation does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.unused = nn.Parameter(torch.ones(3))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.kept = x.mean((2, 3))
        return self.last(x)


def test_a_network_that_keeps_tensors_on_itself_is_traced() -> None:
    graph = lbyl.trace(Keeps(), IMAGE)
    assert graph.names == ["first"]


def test_a_mask_may_hold_minus_infinity() -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
            self.register_buffer("mask", torch.full((4,), -torch.inf))

        def forward(self, x: Tensor) -> Tensor:
            return torch.maximum(self.last(F.relu(self.first(x))), self.mask)

    assert lbyl.trace(Masked(), torch.zeros(1, 6)).names == ["first"]
    broken = Masked()
    broken.last.weight.data[0, 0] = torch.inf
    with pytest.raises(lbyl.LbylError, match=r"last\.weight holds NaN or Inf"):
        lbyl.trace(broken, torch.zeros(1, 6))


def test_saving_into_a_directory_touches_our_files_only(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.write_text("pointed to")
    (out / "link").symlink_to(elsewhere)
    os.mkfifo(out / "pipe")
    result = lbyl.compress(Keeps(), IMAGE, 0.5, method="none")
    with (out / "run.log").open("w") as log:
        log.write("before\n")
        log.flush()
        lbyl.save(result, out)
        log.write("after\n")
    assert (out / "run.log").read_text() == "before\nafter\n"
    assert (out / "link").is_symlink()
    assert sorted(p.name for p in out.iterdir()) == sorted([MODEL, PLAN, "link", "pipe", "run.log"])


class Doubled(nn.Module):
    """The last layer reads the channels of `left` twice, those of `right` once."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.sum, self.last = nn.Linear(6, 16), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        both = torch.cat([left, self.right(x)], dim=1) + self.sum(x)
        return self.last(F.relu(torch.cat([both, left], dim=1)))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 0), (0, 1, 1, 1, 2, 2, 3, 3)])
def test_columns_of_channels_that_are_read_unevenly_are_not_told_apart(
    order: tuple[int, ...],
) -> None:
    """8 columns are divisible by 4 channels, and yet no channel may take another's columns."""
    graph = lbyl.trace(Doubled(), torch.zeros(2, 6), residual=True)
    unit, consumer = graph.units[0], graph.consumers["last"]
    channel = unit.start + torch.tensor(order)
    assert graph.columns(unit, replace(consumer, channel=channel)) is None
    even = graph.columns(unit, replace(consumer, channel=unit.start + torch.tensor([2, 0, 0, 2])))
    assert even is not None and even.tolist() == [[1, 2], [0, 3]]


@pytest.mark.parametrize("method", ["neuron-merging", "lbyl", "moments", "one-to-one"])
def test_a_consumer_that_reads_channels_unevenly_is_only_cut(method: str) -> None:
    model, x = Doubled().eval(), torch.randn(4, 6)
    graph = lbyl.trace(model, x, residual=True)
    plan = quick.plan_for(graph, {unit.name: [0, 1, 7, 9, 15] for unit in graph})
    result = lbyl.compress(model, x, plan, method=method, residual=True)
    assert any(line.startswith("last: the channels of") for line in result.fallbacks)
    assert torch.equal(result.model.last.weight, model.last.weight[:, [0, 1, 7, 9, 15, 16, 17, 23]])


def test_a_unit_with_more_channels_than_its_first_layer_is_loaded(tmp_path: Path) -> None:
    model, x = Doubled().eval(), torch.randn(4, 6)
    result = lbyl.compress(model, x, {"*": 0.3}, method="none", residual=True)
    (unit,) = result.graph.units
    assert unit.channels == 16 and result.model.left.out_features < 8
    lbyl.save(result, tmp_path / "out")
    assert torch.equal(lbyl.load(tmp_path / "out", Doubled().eval())(x), result.model(x))
