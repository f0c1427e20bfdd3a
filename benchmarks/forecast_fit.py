"""The map from equal answers to accuracy kept, its bounds, and the file that ships both.

    python -m benchmarks.forecast_fit [ROWS …] [--signs SIGNS.json] [--folded FOLDED.json]

Rows are settings of networks with labelled images: accuracy kept, and the fraction of equal answers
on held-out synthetic inputs and on real ones. Those given (`benchmarks.forecast` writes them line
by line, `benchmarks.folded` its folded.json) join those of docs/results/forecast-rows.json; a
setting that is there already is replaced. All is fitted again on what is there then, and written to
`lbyl/restoring/calibration.json`.

The curve is logit(kept) = constant + slope · logit(agreement) by least squares, over rows that keep
at least half, networks of equal weight. Every network is left out in turn: its score is the 90 %
point of by how much the curve of the others overestimates it, on the logit scale. `below` is the
second largest score of all networks, `above` that of underestimates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.environment import results_dir
from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_figure, save_results, stored_rows
from benchmarks.common.tables import print_table
from benchmarks.forecast import read_rows
from lbyl.runtime.files import read_json, write_json
from lbyl.scoring import forecast
from lbyl.scoring.forecast import HALF, Calibration, logit

ROWS = "forecast-rows"
POINT = 0.9  # of a network's errors, which is its score
LARGEST = 2  # so manieth largest score is the bound
SHIPPED = Path(forecast.__file__).with_name("calibration.json")

Row = dict[str, Any]
"""A setting of a network: `network`, `setting`, `kept`, agreements `fresh`, `own` or `folded`."""

Numbers = NDArray[np.float64]


def line(rows: Sequence[Row], source: str) -> Numbers:
    """Constant and slope on the logit scale, every network counting the same."""
    names = [row["network"] for row in rows]
    weight = np.array([names.count(name) ** -0.5 for name in names])
    agreement, kept = scales(rows, source)
    columns = np.stack([np.ones_like(agreement), agreement], 1)
    return np.linalg.lstsq(columns * weight[:, None], kept * weight, rcond=None)[0]


def scales(rows: Sequence[Row], source: str) -> tuple[Numbers, Numbers]:
    """Agreement and accuracy kept on the logit scale."""
    pairs = [(logit(row[source]), logit(row["kept"])) for row in rows]
    agreement, kept = np.array(pairs).T
    return agreement, kept


def overestimates(rows: Sequence[Row], source: str) -> dict[str, Numbers]:
    """Network → by how much a curve fitted on the others overestimates it, on the logit scale."""
    found = {}
    for name in dict.fromkeys(row["network"] for row in rows):
        constant, slope = line([row for row in rows if row["network"] != name], source)
        agreement, kept = scales([row for row in rows if row["network"] == name], source)
        found[name] = constant + slope * agreement - kept
    return found


def scores(rows: Sequence[Row], source: str, side: int = 1) -> dict[str, float]:
    """Network → the 90 % point of its overestimates; with `side` −1 of its underestimates."""
    errors = overestimates(rows, source)
    return {name: float(np.quantile(side * own, POINT)) for name, own in errors.items()}


def used(rows: Iterable[Row], source: str, without: str | None = None) -> list[Row]:
    """Rows that a map is fitted on: nothing is promised below half."""
    return [r for r in rows if source in r and r["kept"] >= HALF and r["network"] != without]


def calibration(rows: Iterable[Row], source: str, without: str | None = None) -> Calibration:
    """The map of one kind of inputs, of all networks or of all but one."""
    mine = used(rows, source, without)
    constant, slope = line(mine, source)
    below, above = (sorted(scores(mine, source, side).values())[-LARGEST] for side in (1, -1))
    a, b, low, high = (round(float(n), 4) for n in (constant, slope, below, above))
    return Calibration(a, b, low, high, len({row["network"] for row in mine}))


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """What ships: every map with its version."""
    maps = {source: asdict(calibration(rows, source)) for source in ("fresh", "own", "folded")}
    return {"version": forecast.VERSION, "rows": f"docs/results/{ROWS}.json", "maps": maps}


def measured_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of `benchmarks.forecast`, as they come or in one document."""
    return read_json(path)["rows"] if path.suffix == ".json" else read_rows(path)


def of_measured(row: dict[str, Any]) -> Row | None:
    """A row of `benchmarks.forecast`, with or without further features; None: not finite."""
    fresh = row.get("fresh")
    if "features" in row:
        fresh = row["features"]["painted"].get("agreement")
    if fresh is None:
        return None
    kept = row["accuracy"] / row["base"]
    return entry(row["network"], row["key"], kept, fresh=fresh, own=row["agreement"])


def of_sign(row: dict[str, Any]) -> Row:
    """A row of a file of signs that others measured."""
    agreements = {"fresh": row["agreement"], "own": row["agreement_real"]}
    return entry(row["network"], row["setting"], row["kept"], **agreements)


def of_folded(networks: dict[str, Any]) -> list[Row]:
    """Rows of what `benchmarks.folded` wrote."""
    return [
        entry(f"{name}, folded", row["setting"], row["folded"] / figures["base"],
              folded=row["signs"]["agreement"] if "signs" in row else row["agreement"])
        for name, figures in networks.items()
        for row in figures["rows"]
    ]  # fmt: skip


def entry(network: str, setting: str, kept: float, **agreements: float) -> Row:
    rounded = {source: round(value, 4) for source, value in agreements.items()}
    return {"network": network, "setting": setting, "kept": round(kept, 4), **rounded}


def show(rows: Sequence[Row]) -> None:
    for source in ("fresh", "own", "folded"):
        mine = used(rows, source)
        counts = [row["network"] for row in mine]
        over, under = (scores(mine, source, side) for side in (1, -1))
        table = [[name, counts.count(name), over[name], under[name]] for name in sorted(over)]
        print_table(f"{source} inputs", ["network", "rows", "overestimated", "under"], table)
        print(calibration(rows, source))


def plot(rows: Sequence[Row], shipped: Calibration) -> Any:
    """Accuracy kept against agreement on held-out synthetic inputs; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panel = plt.subplots(figsize=(7, 4.5))
    at = np.linspace(0.01, 0.99, 200)
    kept, low, high = np.array([shipped(float(a), forecast.MANY) for a in at]).T
    panel.fill_between(at, low, high, alpha=0.2, lw=0, label="low to high")
    panel.plot(at, kept, color="black", lw=1)
    mine = [row for row in rows if "fresh" in row]
    for name in sorted({row["network"] for row in mine}):
        points = [(row["fresh"], row["kept"]) for row in mine if row["network"] == name]
        panel.plot(*zip(*points), ".", ms=4, label=name)
    panel.axhline(HALF, color="grey", lw=0.6, ls=":")
    panel.set(xlabel="equal answers on held-out synthetic inputs", ylabel="accuracy kept")
    panel.legend(fontsize=6, ncol=2)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", type=Path, help="what benchmarks.forecast wrote")
    parser.add_argument("--signs", type=Path, help="rows that others measured")
    parser.add_argument("--folded", type=Path, help="what benchmarks.folded wrote")
    options = parser.parse_args()
    found = stored_rows(ROWS)
    measured = [row for path in options.rows for row in measured_rows(path)]
    found += [row for own in measured if (row := of_measured(own)) is not None]
    found += map(of_sign, read_json(options.signs)["rows"] if options.signs else [])
    found += of_folded(read_json(options.folded)["networks"]) if options.folded else []
    rows = list({f"{row['network']} {row['setting']}": row for row in found}.values())
    show(rows)
    shipped = document(rows)
    figure = plot(rows, Calibration(**shipped["maps"]["fresh"]))
    print("stored in", save_results(ROWS, {"rows": rows}))
    if figure is not None:
        save_figure(results_dir() / "forecast.png", figure)
    write_json(SHIPPED, shipped)
    print("stored in", SHIPPED)


if __name__ == "__main__":
    main()
