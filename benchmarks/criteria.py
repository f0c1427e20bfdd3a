"""The paper's large tables: every criterion, ratio and method, and what predicts the accuracy.

    python benchmarks/criteria.py [--networks vgg16_cifar10,...] [--jobs 8]
    python benchmarks/criteria.py --networks resnet34_imagenet --weights resnet34-b627a593.pth
    python benchmarks/criteria.py --small      # ResNet-20, minutes on two cores

`lbyl` and `neuron-merging` are the published code's variants with the hyperparameters that the
paper prints for each cell; `lbyl, theorem` has the same. Beside each accuracy stand RE, BE and
WARE (predicted without data, and from real images), so that their rank correlation with the
accuracy over all settings can be told.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lbyl
import paper
from harness import RESULTS, print_table, pyplot, save_figure, save_results
from jobs import Ledger, chosen, run_parallel
from lbyl.estimate import moment_ware
from lbyl.weights import unit_weights
from restoration import Bench, prepare

NETWORKS = ("vgg16_cifar10", "resnet50_cifar100", "mobilenet_v2_imagenet")
PLAIN = ("l2", "l2-gm", "l1")
CRITERIA = {"mobilenet_v2_imagenet": PLAIN, "resnet20_cifar10": PLAIN}
RATIOS = {
    "mobilenet_v2_imagenet": (0.05, 0.1, 0.3),
    "resnet34_imagenet": (0.1, 0.2, 0.3),
    "resnet101_imagenet": (0.1, 0.2, 0.3),
    "resnet20_cifar10": (0.1, 0.3, 0.5),
}
# Where the paper prints no λ for a network: its figures for ResNet-34 on ImageNet at 10 %, L2.
OTHERWISE = (7e-5, 0.05)
# Methods that choose the channels themselves: one row of theirs serves every criterion.
CHOOSING = ("coreset", "fold")
COLUMNS = ("none", "neuron-merging", "one-to-one", "lbyl", "lbyl, theorem", "coreset", "fold")
COLUMNS += ("moments", "echo", "echo, real images")


def methods(network: str, criterion: str, ratio: float) -> Iterator[tuple[str, Any, str]]:
    """(column, method, source of statistics) with the paper's hyperparameters for this cell."""
    if criterion == "own":
        yield from ((name, name, "procedural") for name in CHOOSING)
        return
    lambdas = _cell(paper.LAMBDAS, network, criterion, ratio) or OTHERWISE
    threshold, balance = _cell(paper.MERGING, network, criterion, ratio) or (0.1, 0.85)
    yield "none", "none", "procedural"
    yield "neuron-merging", lbyl.NeuronMerging(balance, threshold, "released"), "procedural"
    yield "one-to-one", "one-to-one", "procedural"
    yield "lbyl", lbyl.LBYL(*lambdas, variant="released"), "procedural"
    yield "lbyl, theorem", lbyl.LBYL(*lambdas, variant="theorem"), "procedural"
    yield "moments", "moments", "analytic"
    yield "echo", "echo", "procedural"
    yield "echo, real images", "echo", "real"


def _cell(table: Any, network: str, criterion: str, ratio: float) -> Any:
    cells = table.get(network, {}).get(criterion)
    return cells[paper.RATIOS.index(ratio)] if cells and ratio in paper.RATIOS else None


def settings(networks: list[str]) -> list[str]:
    """network/criterion, those that take long first."""
    found = [
        f"{network}/{criterion}"
        for network in networks
        for criterion in ("own", *CRITERIA.get(network, (*PLAIN, *paper.RANDOM)))
    ]
    return sorted(found, key=lambda key: "resnet50" not in key)


def measure(
    bench: Bench, criterion: str, columns: Sequence[str], earlier: dict[str, Any]
) -> dict[str, Any]:
    """All ratios of one criterion, ratio → column → figures, on top of `earlier` ones."""
    rows: dict[str, Any] = {}
    for ratio in RATIOS.get(bench.name, paper.RATIOS):
        cells = dict(earlier.get(f"{ratio:g}", {}))
        for column, method, source in methods(bench.name, criterion, ratio):
            if column not in columns:
                continue
            rule = "l2" if criterion == "own" else criterion
            result = bench.compress(ratio, rule, method, source)
            cells[column] = {
                "accuracy": bench.accuracy(result.model),
                **errors_of(bench, result, lbyl.methods.resolve(method), source),
            }
        rows[f"{ratio:g}"] = cells
        print(bench.name, criterion, ratio, _brief(cells), flush=True)
    return rows


def _brief(cells: dict[str, Any]) -> str:
    return ", ".join(f"{name} {cell['accuracy']:.2f}" for name, cell in cells.items())


def errors_of(
    bench: Bench, result: lbyl.Result, method: lbyl.Method, source: str
) -> dict[str, float]:
    """Mean over layers of RE, BE and WARE, the last from procedural and from real images."""
    weights = unit_weights(bench.graph, bench.model)
    statistics = bench.source(source)
    wares: dict[str, list[float]] = {"ware": [], "real ware": []}
    for name, kept in result.plan.kept.items():
        matrix = method.deliver(weights[name], kept, statistics).matrix
        for key, seen in (("ware", "procedural"), ("real ware", "real")):
            wares[key].append(moment_ware(weights[name], kept, matrix, bench.source(seen)))
    found = {key: sum(values) / len(values) for key, values in wares.items()}
    count = len(result.rows)
    found["re"] = sum(row.residual for row in result.rows) / count
    found["be"] = sum(row.bias for row in result.rows) / count
    found["norm"] = sum(row.norm for row in result.rows) / count
    return found


def spearman(first: list[float], second: list[float]) -> float:
    """Correlation of ranks; equal values share the mean of their ranks."""

    def ranks(values: list[float]) -> torch.Tensor:
        x = torch.tensor(values, dtype=torch.float64)
        return (x[:, None] > x).sum(1).double() + 0.5 * (x[:, None] == x).sum(1).double()

    return float(torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1])


def correlations(runs: dict[str, Any], network: str) -> dict[str, float]:
    """Rank correlations over all settings of a network, signed so that 1 is a perfect guess."""
    cells = [
        cell
        for key, rows in runs.items()
        if key.startswith(f"{network}/")
        for row in rows.values()
        for cell in row.values()
    ]
    accuracy, real = ([c[key] for c in cells] for key in ("accuracy", "real ware"))
    guesses = {
        "RE + BE": [c["re"] + c["be"] for c in cells],
        "WARE without data": [c["ware"] for c in cells],
        "WARE of real images": real,
    }
    found = {f"{name} → accuracy": -spearman(g, accuracy) for name, g in guesses.items()}
    for name in list(guesses)[:2]:
        found[f"{name} → real WARE"] = spearman(guesses[name], real)
    found["settings"] = len(cells)
    return found


def table(runs: dict[str, Any], network: str) -> dict[str, dict[str, Any]]:
    """Line → column → accuracy; the random runs as their mean, as in the paper."""
    lines: dict[str, dict[str, Any]] = {}
    for criterion in (*PLAIN, "random"):
        keys = [f"{network}/{c}" for c in (paper.RANDOM if criterion == "random" else [criterion])]
        parts = [runs[key] for key in keys if key in runs]
        if len(parts) < len(keys):
            continue
        own = runs.get(f"{network}/own", {})
        for ratio in parts[0]:
            found = [{**part[ratio], **own.get(ratio, {})} for part in parts]
            lines[f"{criterion} {100 * float(ratio):.0f} %"] = {
                column: sum(cells[column]["accuracy"] for cells in found) / len(found)
                for column in COLUMNS
                if column in found[0]
            } | _printed(network, criterion, ratio)
    return lines


def _printed(network: str, criterion: str, ratio: str) -> dict[str, float]:
    """What the paper has for this line."""
    figures = paper.ACCURACY.get(network, {}).get(criterion, {})
    place = RATIOS.get(network, paper.RATIOS).index(float(ratio))
    return {f"paper: {m}": v[place] for m, v in figures.items() if place < len(v)}


def show(runs: dict[str, Any], networks: list[str]) -> None:
    printed = [f"paper: {m}" for m in ("none", "neuron-merging", "lbyl")]
    for network in networks:
        lines = table(runs, network)
        rows = [
            [line, *(cells.get(c) for c in (*COLUMNS, *printed))] for line, cells in lines.items()
        ]
        if rows:
            print_table(network, ["pruned", *COLUMNS, *printed], rows)
            found = correlations(runs, network)
            print_table(f"{network}: rank correlation", ["", "ρ"], [*map(list, found.items())])


def plot(runs: dict[str, Any], networks: list[str]) -> Any:
    """Accuracy against ratio, a row of panels per network, a panel per criterion."""
    plt = pyplot()
    if plt is None:
        return None
    wide = ("l2", "l2-gm", "l1", "random")
    shown = [n for n in networks if table(runs, n)]
    if not shown:
        return None
    figure, panels = plt.subplots(
        len(shown), len(wide), figsize=(4 * len(wide), 3.2 * len(shown)), squeeze=False
    )
    for network, line in zip(shown, panels):
        lines = table(runs, network)
        for criterion, panel in zip(wide, line):
            rows = {k.split()[1]: v for k, v in lines.items() if k.split()[0] == criterion}
            if not rows:
                panel.set_axis_off()
                continue
            for column in COLUMNS:
                values = [cells.get(column) for cells in rows.values()]
                if None not in values:
                    width = 3 if column == "echo" else 1.3
                    panel.plot([float(r) for r in rows], values, "o-", ms=3, lw=width, label=column)
            panel.set_title(f"{network.split('_')[0]}, {criterion}", fontsize=9)
            panel.set_xlabel("filters removed, %", fontsize=8)
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy, %")
    panels[0][0].legend(fontsize=6)
    figure.tight_layout()
    return figure


def summary(runs: dict[str, Any], networks: list[str]) -> Any:
    """L2 alone, every method, a panel per network: the picture of the whole."""
    plt = pyplot()
    shown = [n for n in networks if table(runs, n)]
    if plt is None or not shown:
        return None
    figure, panels = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.8), squeeze=False)
    for network, panel in zip(shown, panels[0]):
        lines = {k: v for k, v in table(runs, network).items() if k.startswith("l2 ")}
        ratios = [float(line.split()[1]) for line in lines]
        for column in COLUMNS:
            values = [cells.get(column) for cells in lines.values()]
            if None in values:
                continue
            data = column == "echo, real images"
            style = {"ls": "--", "color": "black", "lw": 1.2} if data else {"lw": 1.4}
            panel.plot(ratios, values, marker="o", ms=3, label=column, **style)
            if column == "echo":
                panel.lines[-1].set(linewidth=3.2, zorder=5)
        panel.set_title(network.replace("_", " "), fontsize=10)
        panel.set_xlabel("filters removed by L2, %")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy, % (nothing trained)")
    handles, names = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="lower center", ncols=len(names))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument("--weights", type=Path, help="of the network, where one alone is named")
    parser.add_argument("--small", action="store_true", help="ResNet-20 on 1,000 images")
    parser.add_argument("--jobs", type=int, default=1, help="settings that run at once")
    parser.add_argument("--seconds", type=float, help="stop what is not done by then")
    parser.add_argument("--columns", help="measure these anew, separated by semicolons")
    parser.add_argument("--only", help="settings by pattern, such as '*/l2'")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "lbyl-runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    networks = ["resnet20_cifar10"] if options.small else options.networks.split(",")
    limit = 1000 if options.small else options.limit
    name = "criteria-small" if options.small else "criteria"
    ledger = Ledger(name, {"limit": limit}, options.scratch)

    columns = options.columns.split(";") if options.columns else COLUMNS
    ledger.adopt(options.results / f"{name}.json")

    def work(key: str) -> None:
        network, criterion = key.split("/")
        bench = prepare(network, options.device, limit, options.weights)
        ledger.keep(key, measure(bench, criterion, columns, ledger.found.get(key, {})))

    if options.worker:
        work(options.worker)
        return
    keys = chosen(settings(networks), options.only)
    ledger.refresh(keys)
    # Named columns are measured anew, and take their place among what is known already.
    missing = [key for key in keys if options.columns or key not in ledger.found]
    if options.jobs > 1:
        run_parallel(missing, options.jobs, options.seconds, lambda: None)
    else:
        for key in missing:
            work(key)
    ledger.refresh(keys, missing)
    every = settings(list({key.split("/")[0]: 1 for key in [*ledger.found, *keys]}))
    known = list({key.split("/")[0]: 1 for key in every})
    show(ledger.found, known)
    kept = ledger.to_dict(every)
    kept["correlations"] = {
        n: correlations(ledger.found, n) for n in known if table(ledger.found, n)
    }
    kept_in = save_results(name, kept, plot(ledger.found, known), options.results)
    whole = summary(ledger.found, known)
    if whole is not None:
        save_figure(options.results / f"{name}-summary.png", whole)
    print("kept in", kept_in)


if __name__ == "__main__":
    main()
