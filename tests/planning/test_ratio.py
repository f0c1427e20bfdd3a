"""How many channels stay, and what a call leaves open."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lbyl
from support.networks import build, example


@pytest.fixture(scope="module")
def bottleneck() -> lbyl.Prepared:
    return lbyl.prepare(build("bottleneck"), example("bottleneck"), exclude="conv3")


def counts(prepared: lbyl.Prepared, ratio: Any, step: Any = None) -> dict[str, int]:
    plan = prepared.plan(ratio, method="none", multiple_of=step)
    return {name: len(kept) for name, kept in plan.kept.items()}


@pytest.mark.parametrize("step", [None, 1, 8, 16])
def test_count_is_the_floor_and_a_multiple(step: int | None) -> None:
    """In whole numbers, which have no rounding; as published for 64, 300, 100 and 512 channels."""
    sizes = [1, 3, 10, 64, 100, 300, 512, 777]
    wide = nn.Sequential(*(nn.Linear(a, b) for a, b in zip([2, *sizes], [*sizes, 3])))
    prepared = lbyl.prepare(wide, torch.zeros(2, 2))
    for percent in (1, 7, 10, 29, 30, 50, 57, 80, 99):
        found = counts(prepared, percent / 100, step)
        assert len(found) == len(sizes) - 1  # of a single channel nothing can go
        for name in found:
            size = prepared.graph[name].channels
            exact = max(1, math.floor(Fraction(100 - percent, 100) * size))
            wanted = exact if step is None else min(size, -(-exact // step) * step)
            assert found[name] == wanted
    assert counts(prepared, 0.0, step) == {u.name: u.channels for u in prepared.graph.units}


def test_patterns_choose_layers_and_the_last_that_fits_counts(bottleneck: lbyl.Prepared) -> None:
    assert counts(bottleneck, {"conv1": 0.5}) == {"conv1": 4, "conv2": 10}
    assert counts(bottleneck, {"*": 0.5, "conv2": 0.2}) == {"conv1": 4, "conv2": 8}
    assert counts(bottleneck, {"conv2": 0.2, "*": 0.5}) == {"conv1": 4, "conv2": 5}
    assert counts(bottleneck, {"conv1": 0.6}, 4) == {"conv1": 4, "conv2": 10}


def test_exclude_and_include_leave_layers_alone() -> None:
    model, x = build("bottleneck"), example("bottleneck")
    skipped = lbyl.compress(model, x, 0.5, method="none", exclude=["conv1", "conv3"])
    assert list(skipped.plan.kept) == ["conv2"] and skipped.model.conv1.out_channels == 8
    assert "asked" in skipped.graph.unprunable["conv1"]
    chosen = lbyl.compress(model, x, 0.5, method="none", include=["conv1"])
    assert list(chosen.plan.kept) == ["conv1"] and chosen.model.conv2.out_channels == 10


@pytest.mark.parametrize("ratio", [np.float32(0.5), np.float64(0.5), 0.5])
def test_numbers_of_any_kind_are_ratios(bottleneck: lbyl.Prepared, ratio: float) -> None:
    assert counts(bottleneck, ratio)["conv2"] == 5


@pytest.mark.parametrize(
    "ratio", [1.0, 1, -0.1, float("nan"), float("inf"), "half", True, [0.5], 50]
)
def test_a_ratio_that_means_nothing_is_refused(bottleneck: lbyl.Prepared, ratio: object) -> None:
    with pytest.raises(lbyl.LbylError, match="ratio for every layer") as caught:
        counts(bottleneck, ratio)
    assert str(ratio) in str(caught.value)
    with pytest.raises(lbyl.LbylError, match="ratio for conv1"):
        counts(bottleneck, {"conv1": ratio})


def test_a_pattern_that_fits_nothing_is_refused(bottleneck: lbyl.Prepared) -> None:
    with pytest.raises(lbyl.LbylError, match=r"'layer4\.\*'.*conv1, conv2"):
        counts(bottleneck, {"layer4.*": 0.5})
    with pytest.raises(lbyl.LbylError, match="patterns of layer names, and 3"):
        counts(bottleneck, {3: 0.5})


@pytest.mark.parametrize("step", [0, -8, 2.5, True])
def test_a_multiple_of_that_means_nothing_is_refused(
    bottleneck: lbyl.Prepared, step: object
) -> None:
    with pytest.raises(lbyl.LbylError, match="multiple_of"):
        counts(bottleneck, 0.5, step)


def test_what_is_not_said_has_its_default() -> None:
    """Three tenths, by `l2`; `echo` tries its own criterion too; methods that choose are named."""
    model, x = build("chain"), example("chain")
    prepared = lbyl.prepare(model, x, data=32)
    for method in ("none", "moments", "lbyl"):
        result = prepared.compress(method=method)
        assert result.chosen_by == "l2" and result.allocation is None
        assert [len(k) for k in result.plan.kept.values()] == [7, 5]
    assert set(prepared.compress({"*": 0.3}).allocation.tried) == {"criterion l2", "criterion echo"}
    assert prepared.compress({"*": 0.3}, criterion="l1").allocation is None
    for method in ("fold", "coreset"):
        plan = prepared.plan(0.3, method=method)
        assert plan.method == lbyl.methods.resolve(method).to_dict() and not plan.criterion
        with pytest.raises(lbyl.LbylError, match="criterion= has no say"):
            prepared.plan(0.3, method=method, criterion="l2")
        some = prepared.plan({"0": 0.5}, method=method)
        assert some.kept["3"].tolist() == list(range(8))
    plan = prepared.plan(0.3, criterion="l2")
    assert plan.criterion == lbyl.criteria.resolve("l2").to_dict() and not plan.method
    for given in ({"criterion": "l2"}, {"multiple_of": 4}):
        with pytest.raises(lbyl.LbylError, match="a plan says which channels stay"):
            prepared.compress(plan, **given)


@pytest.mark.parametrize(
    ("amount", "options", "needed"),
    [
        (0.5, {"criterion": "l2", "method": "none"}, False),
        (0.5, {"criterion": "echo", "method": "none"}, True),
        (0.5, {"criterion": "l2", "method": "echo"}, True),
        (0.5, {"method": "fold"}, False),
        (0.5, {"method": lbyl.methods.LBYL(correction="mean")}, True),
        (lbyl.Budget(macs=0.5), {"criterion": "l2", "method": "none"}, True),
    ],
)
def test_statistics_are_collected_for_whatever_looks_at_them(
    amount: Any, options: dict[str, Any], needed: bool
) -> None:
    """And data that nothing would look at are refused."""
    model, x = build("chain"), example("chain")
    if needed:
        assert lbyl.compress(model, x, amount, data=16, **options).data == "procedural"
    else:
        assert lbyl.compress(model, x, amount, **options).data is None
        with pytest.raises(lbyl.LbylError, match="looks at no data"):
            lbyl.compress(model, x, amount, data=16, **options)
