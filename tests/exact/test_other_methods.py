"""Numbers that other methods than `forward` read: true where they are a width, else left."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lbyl


class Split(nn.Module):
    """Halves of what a convolution gives, taken by `chunk`, or at a width that is written down."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.c = outputs // 2
        self.sizes = (self.c, self.c)
        self.window, self.steps = 32, [32, 1]
        self.first = nn.Conv2d(inputs, 2 * self.c, 1)
        self.inner = nn.Conv2d(self.c, self.c, 3, padding=1)
        self.last = nn.Conv2d(3 * self.c, outputs, 1)

    def rest(self, y: list[Tensor]) -> Tensor:
        out: Tensor = self.last(torch.cat([*y, self.inner(y[-1]).relu()], 1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(list(self.first(x).relu().chunk(2, 1)))

    def forward_split(self, x: Tensor) -> Tensor:
        assert self.window == 32 and self.steps == [32, 1]
        return self.rest(list(self.first(x).relu().split((self.c, self.c), 1)))

    def forward_sizes(self, x: Tensor) -> Tensor:
        return self.rest(list(self.first(x).relu().split(self.sizes, 1)))

    def forward_half(self, x: Tensor) -> Tensor:
        """Another function, of the same input."""
        return self.first(x)[:, : self.c]


class Net(nn.Module):
    """Two such blocks; as many classes as a block has channels in a half."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = 32
        self.stem = nn.Conv2d(3, 16, 3)
        self.one, self.two = Split(16, 64), Split(64, 64)
        self.head = nn.Conv2d(64, self.num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(self.one(self.stem(x).relu()).relu()).relu()).mean((2, 3))
        return out


def build() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(3, 3, 9, 9)


def through(model: Any, method: str, x: Tensor) -> Tensor:
    """What a network gives whose blocks use another method, as an exporter has them do."""
    other = copy.deepcopy(model)
    for block in (other.one, other.two):
        block.forward = getattr(block, method)
    with torch.no_grad():
        return torch.as_tensor(other(x))


def halves(model: Any) -> tuple[int, int]:
    return model.one.first.out_channels // 2, model.two.first.out_channels // 2


@pytest.mark.parametrize("method", ["none", "echo"])
def test_another_method_computes_what_forward_computes(method: str) -> None:
    model, x = build()
    result = lbyl.compress(model, x, 0.4, method=method)
    slim: Any = result.model
    assert (slim.one.c, slim.two.c) == halves(slim) != (32, 32)
    assert slim.one.sizes == (slim.one.c, slim.one.c)
    for name in ("forward_split", "forward_sizes"):
        torch.testing.assert_close(through(slim, name, x), slim(x), rtol=1e-4, atol=1e-5)
    assert (model.one.c, model.two.sizes) == (32, (32, 32))


def test_numbers_that_are_no_width_keep_their_value_and_are_named() -> None:
    model, x = build()
    result = lbyl.compress(model, x, 0.4, method="none")
    slim: Any = result.model
    assert slim.num_classes == 32
    assert all(block.window == 32 and block.steps == [32, 1] for block in (slim.one, slim.two))
    told = " ".join(result.fallbacks)
    for name in ("num_classes of Net", "window of Split", "steps of Split"):
        assert name in told
    assert " c of" not in told and "sizes" not in told
    # Where nothing is cut nothing is named.
    assert "keep their value" not in " ".join(lbyl.compress(model, x, 0.0).fallbacks)


def test_they_are_saved_and_loaded_and_cut_again(tmp_path: Path) -> None:
    model, x = build()
    result = lbyl.compress(model, x, 0.4, method="none")
    again: Any = lbyl.load(lbyl.save(result, tmp_path / "one"), model=build()[0])
    assert (again.one.c, again.one.sizes) == (halves(again)[0], (again.one.c,) * 2)
    torch.testing.assert_close(through(again, "forward_sizes", x), result.model(x))
    smaller: Any = lbyl.compress(again, x, {"two*": 0.3}, method="none").model
    assert smaller.two.c == halves(smaller)[1] < again.two.c
    torch.testing.assert_close(through(smaller, "forward_split", x), smaller(x))


@pytest.mark.parametrize("value", [[16], 16.0, "16", [16, 16, 16], -16])
def test_a_plan_with_other_attributes_is_refused(value: Any, tmp_path: Path) -> None:
    """What is noted beside the weights counts; where there is no note, the plan must be right."""
    model, x = build()
    result = lbyl.compress(model, x, 0.4, method="none")
    folder = lbyl.save(result, tmp_path / "one")
    plan = json.loads((folder / "plan.json").read_text())
    plan["attributes"]["one"]["c" if not isinstance(value, list) else "sizes"] = value
    (folder / "plan.json").write_text(json.dumps(plan))
    again = lbyl.load(folder, model=build()[0])
    torch.testing.assert_close(through(again, "forward_split", x), result.model(x))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    with pytest.raises(lbyl.LbylError, match=r"contradict each other|whole numbers"):
        lbyl.load(folder, model=build()[0])


def test_a_method_that_fails_in_the_original_is_let_be() -> None:
    class Broken(Split):
        def forward_export(self, x: Tensor) -> Tensor:
            raise NotImplementedError(self.c)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Broken(8, 64), nn.Conv2d(64, 4, 1)).eval()
    slim: Any = lbyl.compress(model, torch.randn(2, 3, 6, 6), 0.4, method="none").model
    assert slim[1].c == slim[1].inner.in_channels < 32
