"""Where the time of one compression goes, beside a plain forward pass of the same images."""

from __future__ import annotations

import statistics as stat
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from benchmarks.speed.clock import Spent, spent, wait
from lbyl.runtime.run import evaluation_mode

FORWARD, FORECAST = "one plain forward pass", "forecast"


def forward(model: nn.Module, batches: list[Tensor]) -> None:
    """A plain pass over the images that statistics are collected on."""
    with evaluation_mode(model), torch.inference_mode():
        for batch in batches:
            model(batch.contiguous())  # as anyone has them


def once(model: nn.Module, example: Tensor, ratio: float, refine: int) -> dict[str, Spent]:
    """What each stage of one compression takes, and the pass it is compared with."""
    device = str(example.device)
    held: dict[str, Any] = {}

    def prepare() -> None:
        held["prepared"] = lbyl.prepare(model, example)

    def draw() -> None:
        held["inputs"] = held["prepared"].fresh.collection()

    def compress() -> None:
        held["result"] = held["prepared"].compress({"*": ratio}, criterion="l2", refine=refine)

    taken = {"trace": spent(prepare, device), "images": spent(draw, device)}
    batches = list(held["inputs"].batches)
    taken[FORWARD] = spent(partial(forward, model, batches), device)
    statistics = spent(held["prepared"].statistics, device)
    drawn = held["prepared"].statistics().seconds["images"]
    # Drawn again inside, which counts once.
    part = drawn / statistics.wall
    taken["statistics"] = Spent(statistics.wall - drawn, statistics.processor * (1 - part))
    taken["plan, restore and cut"] = spent(compress, device)
    seconds = held["result"].seconds
    whole = taken["plan, restore and cut"]
    for stage in (FORECAST, "refine"):
        part = seconds.get(stage, 0.0)
        taken[stage] = Spent(part, whole.processor * part / whole.wall)
        whole = Spent(whole.wall - part, whole.processor - taken[stage].processor)
    taken["plan, restore and cut"] = whole
    wait(device)
    return taken


def stages(
    model: nn.Module, example: Tensor, ratio: float, refine: int, runs: int
) -> dict[str, Spent]:
    """The median of several runs, stage by stage; on an accelerator the first one warms up."""
    if example.is_cuda:
        once(model, example, ratio, refine)
    many = [once(model, example, ratio, refine) for _ in range(runs)]
    return {
        stage: Spent(
            stat.median(run[stage].wall for run in many),
            stat.median(run[stage].processor for run in many),
        )
        for stage in many[0]
    }


def table(taken: dict[str, Spent]) -> list[list[Any]]:
    """Rows of stage, milliseconds, and multiples of the plain pass (wall and processor)."""
    plain = taken[FORWARD]
    rows: list[list[Any]] = []
    ours = [stage for stage in taken if stage != FORWARD]
    for stage in (FORWARD, *ours):
        rows.append([stage, *_figures([taken[stage]], plain)])
    closed = [taken[s] for s in ours if s not in (FORECAST, "refine")]
    rows.append(["the closed form, end to end", *_figures(closed, plain)])
    rows.append(["all", *_figures([taken[s] for s in ours], plain)])
    return rows


def _figures(parts: list[Spent], plain: Spent) -> list[float]:
    wall, processor = sum(p.wall for p in parts), sum(p.processor for p in parts)
    return [1000 * wall, wall / plain.wall, processor / plain.processor]
