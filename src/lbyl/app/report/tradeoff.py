"""The report of a sweep: what each network keeps against what it costs, with the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lbyl.app.report.charts import Chart, looks, scatter_chart, series_names
from lbyl.app.report.html import write_page
from lbyl.app.report.numbers import finite, short
from lbyl.app.sweep.recommend import KEEP, recommended_row
from lbyl.errors import LbylError
from lbyl.runtime.format import percent

Rows = Sequence[Mapping[str, Any]]

COSTS = {"macs": "MACs", "parameters": "Parameters", "latency": "Measured time of a pass"}


@dataclass(frozen=True)
class Trial:
    """One row as it is drawn: costs are fractions of the original's."""

    row: Mapping[str, Any]
    name: str  # of its method, and criterion where there are several
    costs: Mapping[str, float]
    value: float  # accuracy or what is kept of it, in per cent, or divergence

    @property
    def label(self) -> str:
        return f"{self.name}, {self.row['kind']} {self.row['amount']:g}, seed {self.row['seed']}"


def write_tradeoff(rows: Rows, path: str | Path) -> Path:
    """Write one self-contained HTML file about the rows of a sweep."""
    done = [row for row in rows if not row.get("failed")]
    if not done:
        raise LbylError("this sweep has no finished row to draw")
    names = dict.fromkeys((str(row["model"]), row.get("weights")) for row in done)
    networks = [_network(i, name, done) for i, name in enumerate(names)]
    return write_page(
        "tradeoff.html",
        path,
        "sweep.html",
        networks=networks,
        failed=[row for row in rows if row.get("failed")],
        count=len(done),
        tabs=[(network["id"], network["name"]) for network in networks],
    )


def _network(index: int, name: tuple[str, str | None], rows: Rows) -> dict[str, Any]:
    own = [row for row in rows if (row["model"], row.get("weights")) == name]
    key, title, larger = _axis(own)
    trials = _trials(own, key)
    kinds = [cost for cost in COSTS if trials and all(cost in t.costs for t in trials)]
    fronts = {cost: pareto([(t.costs[cost], t.value) for t in trials], larger) for cost in kinds}
    original = finite(own[0].get("accuracy_before")) if key == "accuracy" else None
    return {
        "id": f"network-{index}",
        "name": name[0],
        "weights": name[1],
        "key": key,
        "recommended": recommended_row(own),
        "keep": percent(KEEP),
        "title": title,
        "methods": looks(list(dict.fromkeys(t.name for t in trials))),
        "charts": [_chart(cost, title, trials, fronts[cost], original) for cost in kinds],
        "seeds": len({row["seed"] for row in own}) > 1,
        "costs": {cost: COSTS[cost] for cost in kinds},
        "trials": [
            {"trial": t, "best": [c for c in kinds if i in fronts[c]]} for i, t in enumerate(trials)
        ],
    }


def _axis(rows: Rows) -> tuple[str, str, bool]:
    """What is drawn: the best that is known of all rows, and whether more of it is better."""

    def known(key: str) -> bool:
        return all(finite(row.get(key)) is not None for row in rows)

    if known("accuracy"):
        return "accuracy", "Accuracy, %", True
    if known("kept"):
        return "kept", "Accuracy kept as forecast, %", True
    return "divergence", "Divergence from the original", False


def _trials(rows: Rows, key: str) -> list[Trial]:
    made = []
    told = [{**row, "criterion": row.get("chosen") or row.get("criterion")} for row in rows]
    for row, name in zip(rows, series_names(told)):
        value = finite(row.get(key))
        costs = {}
        for cost in COSTS:
            now, before = finite(row.get(cost)), finite(row.get(f"{cost}_before"))
            if now is not None and before:
                costs[cost] = now / before
        if value is not None:
            value *= 100 if key == "kept" else 1
            made.append(Trial(row, name, costs, value))
    return sorted(made, key=lambda trial: trial.costs.get("macs", 1.0))


def pareto(points: Sequence[tuple[float, float]], larger_is_better: bool) -> set[int]:
    """Which points (cost, value) are not beaten: none costs no more and is better in either."""
    sign = -1.0 if larger_is_better else 1.0
    order = sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1]))
    front, best = set(), float("inf")
    for i in order:
        if sign * points[i][1] < best:
            front.add(i)
            best = sign * points[i][1]
    return front


def _chart(
    cost: str, title: str, trials: Sequence[Trial], front: set[int], original: float | None
) -> Chart:
    """A marker for each trial, and a line through those that nothing beats."""
    points = [
        (
            trial.name,
            100 * trial.costs[cost],
            trial.value,
            f"{trial.label}: {100 * trial.costs[cost]:.1f} % of {COSTS[cost]}, "
            f"{title.split(',')[0].lower()} {short(trial.value)}",
        )
        for trial in trials
    ]
    along = sorted((100 * trials[i].costs[cost], trials[i].value) for i in front)
    return scatter_chart(title, f"{COSTS[cost]}, % of the original", points, along, original)
