"""How many channels of each unit are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from lbyl.errors import LbylError
from lbyl.graph.patterns import matches
from lbyl.graph.unit import Graph, Unit

Ratio = float | Mapping[str, float]
"""The fraction of channels pruned: one number, or layer-name patterns with a number each."""


Steps = int | Mapping[str, int] | None
"""Kept counts are rounded up to multiples: of one number for all units, or of one for each."""


def kept_count(channels: int, ratio: float, multiple_of: int | None = None, blocks: int = 1) -> int:
    """floor(m(1 − ratio)), at least one; rounded up to a multiple where one is asked for.

    All of that for each of a unit's blocks, of which equally many channels are kept.
    """
    size = channels // blocks
    count = max(1, math.floor(size * (1 - ratio) + 1e-9))
    return blocks * min(size, rounded_up(count, multiple_of))


def rounded_up(count: int, multiple_of: int | None) -> int:
    """The next multiple, where one is asked for."""
    return math.ceil(count / multiple_of) * multiple_of if multiple_of else count


def steps_of(graph: Graph, multiple_of: int | None) -> dict[str, int]:
    """Unit → the number that a multiple of is kept: heads go one by one, blocks all alike."""
    return {unit.name: unit.blocks * (_multiple(unit, multiple_of) or 1) for unit in graph.units}


def _multiple(unit: Unit, asked: int | None) -> int | None:
    """What a multiple of is kept of each block: as asked for, and as kernels need it."""
    wanted = None if unit.kind == "heads" else asked
    return math.lcm(wanted or 1, unit.multiple) if unit.multiple > 1 else wanted


def step_of(steps: Steps, name: str) -> int | None:
    """The number that a multiple of is kept of a unit, None where any number is."""
    return steps.get(name) if isinstance(steps, Mapping) else steps


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
            reasons = [f"{n}: {r}" for n, r in graph.unprunable.items() if matches(n, name)]
            why = f" ({'; '.join(reasons[:3])})" if reasons else ""
            raise LbylError(
                f"no prunable layer is named like {name!r}{why}; they are {', '.join(graph.names)}"
            )


def check_multiple(multiple_of: int | None) -> None:
    if multiple_of is not None and (type(multiple_of) is not int or multiple_of < 1):
        raise LbylError(f"multiple_of is {multiple_of!r}: it must be a positive whole number")


def counts(graph: Graph, ratio: Ratio, multiple_of: int | None = None) -> dict[str, int]:
    """Unit name → number of kept channels."""
    check_ratio(graph, ratio)
    check_multiple(multiple_of)
    return {
        unit.name: kept_count(
            unit.channels,
            ratio_of(unit, ratio),
            _multiple(unit, multiple_of),
            unit.blocks,
        )
        if ratio_of(unit, ratio) > 0
        else unit.channels
        for unit in graph.units
    }
