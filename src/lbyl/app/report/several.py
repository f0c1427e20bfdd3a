"""Several compressions on one page: what each keeps against what it costs, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lbyl.app.report.charts import Chart, looks, scatter_chart
from lbyl.app.report.html import write_page
from lbyl.app.report.numbers import size
from lbyl.app.report.tradeoff import pareto
from lbyl.app.sweep.recommend import KEEP, recommend
from lbyl.errors import LbylError
from lbyl.result import Result
from lbyl.runtime.format import human, percent

COSTS = {"macs": "Multiply–adds", "parameters": "Parameters", "bytes": "Size of weights"}


@dataclass(frozen=True)
class Run:
    """A compression under the name of its directory."""

    name: str
    result: Result
    accuracy: float | None = None  # measured, in per cent
    original: float | None = None  # that of the network before
    command: str = ""

    def cost(self, key: str) -> float:
        """The fraction that is left."""
        return getattr(self.result.after, key) / max(getattr(self.result.before, key), 1)

    @property
    def kept(self) -> float | None:
        """The fraction of the accuracy that is kept: measured, or else as forecast."""
        if self.accuracy is not None and self.original:
            return self.accuracy / self.original
        return None if self.result.forecast is None else self.result.forecast.kept

    @property
    def interval(self) -> str:
        told = self.result.forecast
        if told is None or told.kept is None:
            return "–"
        return f"{percent(told.kept)} ({percent(told.low)} to {percent(told.high)})"


def write_several(runs: Sequence[Run], path: str | Path) -> Path:
    """Write one self-contained HTML file that compares several compressions."""
    if len(runs) < 2:
        raise LbylError("a comparison needs at least two compressions")
    known = [run for run in runs if run.kept is not None]
    return write_page(
        "several.html",
        path,
        runs=[_row(run) for run in runs],
        charts=[_chart(key, known) for key in COSTS] if known else [],
        methods=looks([run.name for run in known]),
        layers=_layers(runs),
        names=[run.name for run in runs],
        advice=_advice(known),
        tabs=[("tradeoff", "Trade-off"), ("layers", "Layers"), ("repeat", "Repeat")],
    )


def _row(run: Run) -> dict[str, Any]:
    after = run.result.after
    return {
        "name": run.name,
        "story": run.result.story,
        "forecast": run.interval,
        "accuracy": "–" if run.accuracy is None else f"{run.accuracy:.2f} %",
        "parameters": f"{human(after.parameters)} ({percent(run.cost('parameters'))})",
        "macs": f"{human(after.macs)} ({percent(run.cost('macs'))})",
        "bytes": size(after.bytes),
        "seconds": f"{sum(run.result.seconds.values()):.1f} s",
        "command": run.command,
    }


def _chart(key: str, runs: Sequence[Run]) -> Chart:
    """What is kept against what is left, with the line of what nothing beats."""
    places = [(100 * run.cost(key), 100 * (run.kept or 0.0)) for run in runs]
    points = [
        (run.name, x, y, f"{run.name}: {y:.1f} % kept at {x:.1f} % of {COSTS[key].lower()}")
        for run, (x, y) in zip(runs, places)
    ]
    front = sorted(places[i] for i in pareto(places, True))
    title = "Accuracy kept, %"
    return scatter_chart(title, f"{COSTS[key]}, % of the original", points, front, None)


def _advice(runs: Sequence[Run]) -> tuple[str, str] | None:
    """Which run to pick, by the rule that a sweep goes by, and why."""
    if len(runs) < 2:
        return None
    index = recommend([(run.cost("macs"), run.kept) for run in runs])
    if index is not None:
        return runs[index].name, f"is the smallest that keeps {percent(KEEP)} of the accuracy"
    most = max(runs, key=lambda run: run.kept or 0.0)
    return (
        most.name,
        f"keeps most, {percent(most.kept)} of the accuracy; none keeps {percent(KEEP)}",
    )


def _layers(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every layer that any of them prunes: channels kept and error at its consumers, of each."""
    rows = [{row.unit: row for row in run.result.rows} for run in runs]
    names = list(dict.fromkeys(unit for by_unit in rows for unit in by_unit))
    made = []
    for name in names:
        cells: list[dict[str, Any]] = []
        for by_unit in rows:
            row = by_unit.get(name)
            if row is None:
                cells.append({"kept": "–", "fraction": None, "error": "–"})
                continue
            fraction = row.kept / max(row.channels, 1)
            kept = f"{row.kept}/{row.channels}"
            cells.append({"kept": kept, "fraction": fraction, "error": percent(row.error)})
        if any(cell["fraction"] not in (None, 1.0) for cell in cells):
            made.append({"name": name, "cells": cells})
    return made
