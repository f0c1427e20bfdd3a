"""Ways of collecting beside the one in use."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.collecting import IMAGES, IN_USE, NEVER, WINDOWS, cost, left_out, prepare, ways
from support.networks import build, example


def row(net: str, windows: float, divergence: float, **more: Any) -> dict[str, Any]:
    at = {"net": net, "seed": 0, "ratio": 0.5, **IN_USE, "windows": windows, **more}
    return {**at, "divergence": divergence, "accuracy": 90 - divergence}


def test_a_cost_is_told_beside_the_way_in_use() -> None:
    rows = [row("one", 1.0, 2.0), row("one", 4.0, 4.0), row("one", 1.0, 1.0, batch=32)]
    assert cost(rows, IN_USE) == (0.0, 0.0)
    assert cost(rows, {**IN_USE, "windows": 4.0}) == (pytest.approx(100 * math.log(2)), -2.0)
    assert cost(rows, {**IN_USE, "batch": 32}) == (pytest.approx(-100 * math.log(2)), 1.0)


def test_fewer_images_are_compared_among_themselves() -> None:
    rows = [row("one", 1.0, 1.0), row("one", 1.0, 2.0, images=32), row("one", 4.0, 4.0, images=32)]
    assert cost(rows, {**IN_USE, "windows": 4.0, "images": 32})[1] == -2.0


def test_a_network_is_told_what_costs_least_on_the_others() -> None:
    rows = [row("one", w, 1.0 + (w != 2.0), images=n) for w in WINDOWS for n in IMAGES]
    rows += [row("other", w, 1.0 + (w != 4.0), images=n) for w in WINDOWS for n in IMAGES]
    one, other = left_out(rows)
    assert one[:2] == ["one", 4.0] and other[:2] == ["other", 2.0]
    assert one[2] == other[2] == 0.0  # as much as the way in use


@pytest.mark.parametrize("way", [{"windows": NEVER}, {"windows": 0.0}, {"batch": 8}])
def test_statistics_are_collected_in_the_way_that_is_asked_for(way: dict[str, Any]) -> None:
    model, x = build("bottleneck"), example("bottleneck")
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    prepared = prepare(model, x, 0, {**IN_USE, "images": 24, **way})
    taps = {m.taps for m in prepared.statistics().moments.values()}
    assert taps == {1} if way.get("windows") == NEVER else taps == {1, 9}
    assert seen[-1] == (8 if "batch" in way else 24)
    assert isinstance(prepared.compress(0.5).model(x), torch.Tensor)


def test_the_way_in_use_is_among_those_compared() -> None:
    assert IN_USE in list(ways())
