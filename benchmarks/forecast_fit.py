"""The map from what is known without data to accuracy kept, and how far it is off.

    python -m benchmarks.forecast_fit ROWS.jsonl …     # what `benchmarks.forecast measure` wrote
    python -m benchmarks.forecast_fit --unseen ROWS.jsonl …     # nothing is fitted: the shipped map

Every figure told of a network comes from a map that was fitted on the other networks, its interval
from errors made on the others in the same way. The constants printed at the end are those of
`lbyl/restoring/forecast.py`, fitted on all. Stores forecast.json and forecast.png; with
`--unseen`, for networks that took no part, forecast-unseen.json and forecast-unseen.png.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from benchmarks.forecast import read_rows
from lbyl.restoring.forecast import FRESH, OWN, Calibration, Signs

KNOTS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96, 1.0)  # forecasts at which errors are tabled
WIDTH = (0.15, 0.02)  # of the neighbourhood errors are taken from, at a forecast of nothing and all
COVERED = 0.9
FEWEST_SETTINGS = 20  # of a network that was measured only in part nothing is told
WIDER = tuple(0.5 + i / 16 for i in range(90))  # factors, the first that covers is taken
LEAST = 0.01  # to either side: test images, some hundreds to thousands, tell no more
FEWEST = 1.0  # settings near a knot, for a network to have a say there
GOOD = 0.1  # below it a network answers by chance, and ranks mean nothing
SOURCES = ("fresh", "own")
MOBILE = ("mobilenet_v2", "efficientnet_lite0")
# Networks by whose rows the features were chosen: their coverage alone would flatter.
CHOSEN_ON = ("digits", "lenet300_100_fashionmnist", *(f"{n}_imagenet" for n in MOBILE))
USED = {"fresh": ("divergence", "correlation"), "own": ("differing",)}


def signs(row: dict[str, Any], source: str) -> Signs | None:
    """What the library would measure; None where outputs are not finite."""
    told = row["features"]["painted"]
    if not told.get("finite"):
        return None
    if source == "own":
        return Signs(row["agreement"], told["kl_2"], told["correlation"])
    by_batch = row["features"].get("by-batch", told)
    correlation = by_batch.get("correlation", 0.0)
    return Signs(told["agreement"], told["kl_2"], correlation)


@dataclass(frozen=True)
class Table:
    """All settings: signs as numbers, the truth, and the network of each."""

    features: Tensor  # (rows, 1 + used)
    kept: Tensor
    network: np.ndarray[Any, Any]
    used: Sequence[str]

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], source: str) -> Table:
        found = [(row, told) for row in rows if (told := signs(row, source)) is not None]
        numbers = [[1.0, *(told.numbers[name] for name in USED[source])] for _, told in found]
        kept = [min(1.0, row["accuracy"] / row["base"]) for row, _ in found]
        names = np.array([row["network"] for row, _ in found])
        dtype = torch.float64
        return cls(
            torch.tensor(numbers, dtype=dtype), torch.tensor(kept, dtype=dtype), names, USED[source]
        )

    def without(self, name: str | None) -> np.ndarray[Any, Any]:
        every = np.ones(len(self.network), dtype=bool)
        return every if name is None else self.network != name

    def fit(self, where: np.ndarray[Any, Any]) -> Tensor:
        """Weights of least squares, every network counting the same; signs may only harm."""
        mask = torch.from_numpy(where)
        x, y = self.features[mask], self.kept[mask]
        counts = {n: float((self.network[where] == n).sum()) for n in set(self.network[where])}
        each = torch.tensor([1 / counts[n] for n in self.network[where]], dtype=x.dtype)
        raw = torch.full((x.shape[1],), 0.3, dtype=x.dtype, requires_grad=True)
        optimiser = torch.optim.LBFGS([raw], max_iter=500, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            error = each * (torch.sigmoid(-x @ _weights(raw)) - y).square()
            value = error.sum() + 1e-3 * raw[1:].square().sum()
            value.backward()
            return value

        optimiser.step(loss)
        return _weights(raw.detach())

    def told(self, weights: Tensor, where: np.ndarray[Any, Any]) -> Tensor:
        return torch.sigmoid(-self.features[torch.from_numpy(where)] @ weights)


def _weights(raw: Tensor) -> Tensor:
    return torch.cat([raw[:1], raw[1:].abs()])


def left_out(table: Table) -> Tensor:
    """The forecast of every setting by a map that has not seen its network."""
    made = torch.zeros_like(table.kept)
    for name in sorted(set(table.network)):
        others = table.without(name)
        made[torch.from_numpy(~others)] = table.told(table.fit(others), ~others)
    return made


def error_table(told: Tensor, truth: Tensor, network: np.ndarray[Any, Any]) -> list[list[float]]:
    """For every knot: how far below and above a forecast near it the truth lies.

    The network on which it is furthest off decides: settings of one network err alike, so that
    those of all together would tell little of a network that was never seen.
    """
    made = []
    forecasts, errors = told.numpy(), (truth - told).numpy()
    for knot in KNOTS:
        width = WIDTH[0] + knot * (WIDTH[1] - WIDTH[0])
        near = np.exp(-(((forecasts - knot) / width) ** 2) / 2)
        ends = []
        for name in sorted(set(network)):
            mine = network == name
            if near[mine].sum() < FEWEST:  # this network has nothing to tell here
                continue
            levels = ((1 - COVERED) / 2, (1 + COVERED) / 2)
            ends.append([_quantile(errors[mine], near[mine], level) for level in levels])
        low, high = min(e[0] for e in ends), max(e[1] for e in ends)
        made.append([knot, round(max(0.0, -low), 4), round(max(0.0, high), 4)])
    return made


def _quantile(values: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], at: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, at * total[-1])])


def calibration(
    table: Table, told: Tensor, name: str | None = None, wider: float = 1.0
) -> Calibration:
    """Fitted on all networks but one, with the errors that were made on those."""
    others = table.without(name)
    weights = table.fit(others).tolist()
    by_name = dict(zip(table.used, (round(w, 4) for w in weights[1:])))
    mask = torch.from_numpy(others)
    errors = error_table(told[mask], table.kept[mask], table.network[others])
    points = tuple(
        (k, round(max(wider * b, LEAST), 4), round(max(wider * a, LEAST), 4)) for k, b, a in errors
    )
    return Calibration(round(weights[0], 4), by_name, points)


def judged(
    rows: Sequence[dict[str, Any]], source: str
) -> tuple[dict[str, Any], Calibration, float]:
    """For every network how far the forecast is off; the calibration on all; its widening.

    Intervals are widened by one factor until, on the mean of networks left out, they cover what
    they promise: of all settings, of those that lose little, and of networks on which no choice was
    made.
    """
    table = Table.of(rows, source)
    told = left_out(table)
    for wider in WIDER:
        networks = {
            name: _network(rows, source, name, table, calibration(table, told, name, wider))
            for name in sorted(set(table.network))
        }
        covered = [[n[key] for n in networks.values()] for key in ("covered", "covered_mild")]
        covered.append([n["covered"] for m, n in networks.items() if m not in CHOSEN_ON])
        if min(np.mean(part) for part in covered if part) >= COVERED:
            break
    return networks, calibration(table, told, None, wider), wider


def _network(
    rows: Sequence[dict[str, Any]], source: str, name: str, table: Table, unseen: Calibration
) -> dict[str, Any]:
    """How far a map that has not seen a network is off on it."""
    forecasts = [unseen(signs_) for signs_ in _signs_of(rows, source, name)]
    truth = table.kept[torch.from_numpy(~table.without(name))]
    kept, low, high = (torch.tensor(part, dtype=truth.dtype) for part in zip(*forecasts))
    inside = (truth >= low - 1e-9) & (truth <= high + 1e-9)
    mild, able = truth > 0.85, truth > GOOD
    half = (high - low) / 2
    return {
        "settings": len(truth),
        "rank": round(spearman(kept[able], truth[able]), 4),
        "error": round(float((kept - truth).abs().mean()), 4),
        "error_mild": round(float((kept - truth)[mild].abs().mean()), 4),
        "covered": round(float(inside.double().mean()), 4),
        "covered_mild": round(float(inside[mild].double().mean()), 4),
        "half_width_mild": round(float(half[mild].mean()), 4),
        "points": [[round(float(v), 4) for v in point] for point in zip(truth, kept, low, high)],
    }


def _signs_of(rows: Sequence[dict[str, Any]], source: str, name: str) -> list[Signs]:
    mine = [signs(row, source) for row in rows if row["network"] == name]
    return [told for told in mine if told is not None]


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    ranks = []
    for values in (a.double(), b.double()):
        unique, index = values.unique(return_inverse=True)
        count = torch.bincount(index, minlength=len(unique)).double()
        ranks.append((count.cumsum(0) - (count - 1) / 2)[index])
    return float(torch.corrcoef(torch.stack(ranks))[0, 1]) if len(a) > 2 else math.nan


def plot(networks: dict[str, Any]) -> Any:
    """Accuracy kept against its forecast, a panel a network; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    columns = min(4, len(networks))
    lines = -(-len(networks) // columns)
    size = (3.4 * columns, 3.2 * lines)
    figure, panels = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for panel in panels.flat[len(networks) :]:
        panel.axis("off")
    for panel, (name, found) in zip(panels.flat, networks.items()):
        points = sorted(found["points"], key=lambda p: p[1])
        truth, kept, low, high = (np.array(part) for part in zip(*points))
        panel.fill_between(kept, low, high, alpha=0.25, lw=0, label="90 % interval")
        panel.plot([0, 1], [0, 1], color="grey", lw=0.8)
        panel.plot(kept, truth, ".", ms=4, label="settings")
        panel.set_title(f"{name}\nrank {found['rank']:.2f}", fontsize=9)
        panel.set_xlabel("forecast without data", fontsize=8)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy kept", fontsize=8)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    return figure


COLUMNS = (
    "settings", "rank", "error", "error_mild", "covered", "covered_mild", "half_width_mild",
)  # fmt: skip
STORED = ("network", "key", "base", "accuracy", "agreement", "images", "macs", "features")


def shipped(rows: Sequence[dict[str, Any]], source: str) -> dict[str, Any]:
    """For every network how far the map that ships is off."""
    table = Table.of(rows, source)
    made = OWN if source == "own" else FRESH
    names = sorted(set(table.network))
    return {name: _network(rows, source, name, table, made) for name in names}


def fitted(rows: Sequence[dict[str, Any]], source: str) -> dict[str, Any]:
    """The map fitted on these rows, and how far it is off on networks left out."""
    networks, made, wider = judged(rows, source)
    print(source, f"widened {wider:g} times", made)
    return {
        "networks": networks,
        "widened": wider,
        "calibration": {"constant": made.constant, "weights": made.weights},
        "errors": made.errors,
    }


def show(source: str, networks: dict[str, Any]) -> None:
    table = [[name, *(found[c] for c in COLUMNS)] for name, found in networks.items()]
    means = [float(np.nanmean([line[i] for line in table])) for i in range(1, len(COLUMNS) + 1)]
    print_table(f"{source} inputs", ["network", *COLUMNS], [*table, ["mean", *means]])


def as_stored(row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a row: features on painted inputs."""
    features = {w: row["features"][w] for w in ("painted", "by-batch") if w in row["features"]}
    return {key: row[key] for key in STORED} | {"features": features}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--unseen", action="store_true", help="judge the shipped map, fit nothing")
    options = parser.parse_args()
    by_key: dict[str, dict[str, Any]] = {}
    for path in options.rows:
        by_key |= {f"{row['network']} {row['key']}": row for row in read_rows(path)}
    counts = Counter(row["network"] for row in by_key.values())
    rows = [row for row in by_key.values() if counts[row["network"]] >= FEWEST_SETTINGS]
    left_over = sorted(name for name, count in counts.items() if count < FEWEST_SETTINGS)
    print("measured only in part, not used:", ", ".join(left_over) or "none")
    stored: dict[str, Any] = {"covered": COVERED, "settings": len(rows)}
    for source in SOURCES:
        told = {"networks": shipped(rows, source)} if options.unseen else fitted(rows, source)
        show(source, told["networks"])
        stored[source] = told
    stored["rows"] = [as_stored(row) for row in rows]
    name = "forecast-unseen" if options.unseen else "forecast"
    print("stored in", save_results(name, stored, plot(stored["fresh"]["networks"])))


if __name__ == "__main__":
    main()
