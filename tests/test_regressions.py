"""What was once wrong and must not be again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.storage import MODEL, PLAN

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
