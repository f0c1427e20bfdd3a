"""How many channels of each unit stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from lbyl.exceptions import LbylError
from lbyl.patterns import matches
from lbyl.unit import Graph, Unit

Ratio = float | Mapping[str, float]
"""The share of channels that go: one number, or layer-name patterns with a number each."""


def kept_count(channels: int, ratio: float, round_to: int | None = None) -> int:
    """floor(m(1 − ratio)), at least one; rounded up to a multiple where one is asked for."""
    count = max(1, math.floor(channels * (1 - ratio) + 1e-9))
    if round_to:
        count = math.ceil(count / round_to) * round_to
    return min(channels, count)


def ratio_of(unit: Unit, ratio: Ratio) -> float:
    """The ratio of one unit: of the patterns that fit, the last given counts."""
    if not isinstance(ratio, Mapping):
        return float(ratio)
    fitting = [value for pattern, value in ratio.items() if matches(unit.name, pattern)]
    return float(fitting[-1]) if fitting else 0.0


def check_ratio(graph: Graph, ratio: Ratio) -> None:
    """One clear error for a ratio that means nothing."""
    named = ratio.items() if isinstance(ratio, Mapping) else [("every layer", ratio)]
    for name, value in named:
        if not isinstance(name, str):
            raise LbylError(f"ratios go by patterns of layer names, and {name!r} is none")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise LbylError(f"the ratio for {name} must be a number, not {value!r}")
        if not 0 <= value < 1:
            raise LbylError(f"the ratio for {name} is {value}: it must be at least 0 and below 1")
        if isinstance(ratio, Mapping) and not any(matches(u, name) for u in graph.names):
            raise LbylError(
                f"no prunable layer is named like {name!r}; they are {', '.join(graph.names)}"
            )


def counts(graph: Graph, ratio: Ratio, round_to: int | None = None) -> dict[str, int]:
    """Unit name → number of channels that stay."""
    check_ratio(graph, ratio)
    if round_to is not None and (type(round_to) is not int or round_to < 1):
        raise LbylError(f"round_to is {round_to}: it must be a positive whole number")
    return {
        unit.name: kept_count(unit.channels, ratio_of(unit, ratio), round_to)
        if ratio_of(unit, ratio) > 0
        else unit.channels
        for unit in graph.units
    }
