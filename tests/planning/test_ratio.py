"""How many channels stay."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lbyl
from lbyl.planning.ratio import counts, kept_count
from support.networks import build, example


@pytest.mark.parametrize(
    ("channels", "ratio", "kept"),
    [(64, 0.1, 57), (300, 0.8, 60), (100, 0.8, 20), (10, 0.3, 7), (3, 0.99, 1), (512, 0.5, 256)],
)
def test_published_counts(channels: int, ratio: float, kept: int) -> None:
    assert kept_count(channels, ratio) == kept


@given(st.integers(1, 2048), st.integers(0, 99), st.sampled_from([None, 1, 8, 16]))
def test_count_is_the_floor_and_a_multiple(channels: int, percent: int, step: int | None) -> None:
    count = kept_count(channels, percent / 100, step)
    exact = max(1, channels * (100 - percent) // 100)  # whole numbers have no rounding
    if step is None:
        assert count == exact
    else:
        assert count == min(channels, math.ceil(exact / step) * step)
    assert 1 <= count <= channels


def graph(name: str = "bottleneck") -> lbyl.Graph:
    return lbyl.trace(build(name), example(name), exclude="conv3")


def test_patterns_choose_layers_and_the_last_that_fits_counts() -> None:
    assert counts(graph(), {"conv1": 0.5}) == {"conv1": 4, "conv2": 10}
    assert counts(graph(), {"*": 0.5, "conv2": 0.2}) == {"conv1": 4, "conv2": 8}
    assert counts(graph(), {"conv2": 0.2, "*": 0.5}) == {"conv1": 4, "conv2": 5}


def test_multiple_of_leaves_unpruned_layers_whole() -> None:
    assert counts(graph(), {"conv1": 0.6}, 4) == {"conv1": 4, "conv2": 10}
    assert counts(graph(), 0.01, 4) == {"conv1": 8, "conv2": 10}


def test_exclude_and_include_leave_layers_alone() -> None:
    model, x = build("bottleneck"), example("bottleneck")
    skipped = lbyl.compress(model, x, 0.5, method="none", exclude=["conv1", "conv3"])
    assert list(skipped.plan.kept) == ["conv2"] and skipped.model.conv1.out_channels == 8
    assert "asked" in skipped.graph.unprunable["conv1"]
    chosen = lbyl.compress(model, x, 0.5, method="none", include=["conv1"])
    assert list(chosen.plan.kept) == ["conv1"] and chosen.model.conv2.out_channels == 10


@pytest.mark.parametrize("ratio", [np.float32(0.5), np.float64(0.5), 0.5])
def test_numbers_of_any_kind_are_ratios(ratio: float) -> None:
    assert counts(graph(), ratio)["conv2"] == 5


@pytest.mark.parametrize(
    "ratio", [1.0, 1, -0.1, float("nan"), float("inf"), "half", None, True, [0.5], 50]
)
def test_a_ratio_that_means_nothing_is_refused(ratio: object) -> None:
    with pytest.raises(lbyl.LbylError, match="ratio for every layer") as caught:
        counts(graph(), ratio)  # type: ignore[arg-type]
    assert str(ratio) in str(caught.value)
    with pytest.raises(lbyl.LbylError, match="ratio for conv1"):
        counts(graph(), {"conv1": ratio})  # type: ignore[dict-item]


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(lbyl.LbylError, match=r"'layer4\.\*'.*conv1, conv2"):
        counts(graph(), {"layer4.*": 0.5})
    with pytest.raises(lbyl.LbylError, match="patterns of layer names, and 3"):
        counts(graph(), {3: 0.5})  # type: ignore[dict-item]


@pytest.mark.parametrize("step", [0, -8, 2.5, True])
def test_a_multiple_of_that_means_nothing_is_refused(step: object) -> None:
    with pytest.raises(lbyl.LbylError, match="multiple_of"):
        counts(graph(), 0.5, step)  # type: ignore[arg-type]


def test_every_number_is_a_multiple_of_one() -> None:
    assert counts(graph(), 0.5, 1) == counts(graph(), 0.5)
