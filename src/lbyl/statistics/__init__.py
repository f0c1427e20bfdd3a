"""Statistics of what consumers read: from procedural images, a user's images, or weights alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lbyl.exceptions import LbylError
from lbyl.record import Inputs
from lbyl.statistics.base import Moments, Statistics
from lbyl.statistics.gather import Progress, run_passes
from lbyl.statistics.memory import recalled
from lbyl.statistics.sources import calibration as calibration_passes
from lbyl.statistics.sources import inverted, procedural
from lbyl.statistics.synthetic import procedural_images
from lbyl.unit import Graph


def collect(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    graph: Graph | None = None,
    calibration: Iterable[Any] | Tensor | None = None,
    images: int | str | None = None,
    taps: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Run `model` once and keep what every later compression of it needs.

    Without `calibration` the network runs on procedural images with BatchNorm going by the batch,
    so no data is needed; `images` is how many, or "inversion" for images that gradient steps make
    agree with BatchNorm's memory (slower, better). With `calibration` it runs on those inputs in
    its ordinary mode. `taps` is "auto" or "channels" (see `docs/how-it-works.md`).
    """
    from lbyl.trace import trace

    _check_options(images, taps)
    graph = graph or trace(model, example_inputs)
    count = images if isinstance(images, int) else None
    if calibration is not None:
        passes = calibration_passes(model, calibration, limit=count)
    else:
        passes = procedural(model, example_inputs, count=count, seed=seed)
        if images == "inversion":
            passes = inverted(model, passes, progress)
    found = run_passes(model, graph, passes, taps=taps, seed=seed, progress=progress)
    # A user's own inputs speak for themselves, and inverted ones agree with the network's memory
    # already; procedural ones yield to it.
    return recalled(model, graph, found) if passes.batch_statistics else found


def _check_options(images: int | str | None, taps: str) -> None:
    if isinstance(images, str) and images not in ("procedural", "inversion"):
        raise LbylError(f"images is {images!r}: give a number, 'procedural' or 'inversion'")
    if isinstance(images, int) and images < 2:
        raise LbylError(f"images is {images}: statistics need at least 2")
    if taps not in ("auto", "channels"):
        raise LbylError(f"taps is {taps!r}: it must be 'auto' or 'channels'")


__all__ = ["Moments", "Statistics", "collect", "procedural_images"]
