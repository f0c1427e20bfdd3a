"""Statistics of what consumers read: from procedural images, a user's images, or weights alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lbyl.record import Inputs
from lbyl.statistics.base import Moments, Statistics
from lbyl.statistics.collect import run_passes
from lbyl.statistics.sources import calibration as calibration_passes
from lbyl.statistics.sources import procedural
from lbyl.statistics.synthetic import procedural_images
from lbyl.unit import Graph


def collect(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    graph: Graph | None = None,
    calibration: Iterable[Any] | Tensor | None = None,
    images: int | None = None,
    taps: str = "auto",
    seed: int = 0,
) -> Statistics:
    """Run `model` once and keep what every later compression of it needs.

    Without `calibration` the network runs on procedural images (`images` of them) with BatchNorm
    going by the batch, so no data is needed. With it, on those inputs in its ordinary mode.
    """
    from lbyl.trace import trace

    graph = graph or trace(model, example_inputs)
    if calibration is not None:
        passes = calibration_passes(model, calibration, limit=images)
    else:
        passes = procedural(model, example_inputs, count=images, seed=seed)
    return run_passes(model, graph, passes, taps=taps, seed=seed)


__all__ = ["Moments", "Statistics", "collect", "procedural_images"]
