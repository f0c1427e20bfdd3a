"""Accuracy after pruning and restoring, every method side by side, on real networks.

    python -m benchmarks.restoration                 # all networks, full test sets (a GPU helps)
    python -m benchmarks.restoration --small         # minutes on two cores

Prints a table per network and stores JSON and a plot in docs/results. Real images are test images
used without their labels; everything else needs no data at all. `lbyl` is shown with the best of a
grid of its two hyperparameters, chosen by test accuracy: more than a user could do.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lbyl
from benchmarks.common.environment import default_device, environment
from benchmarks.common.networks import NETWORKS, Case, criterion_for, load_case
from benchmarks.common.plots import pyplot
from benchmarks.common.results import merged_networks, save_results
from benchmarks.common.tables import print_table
from lbyl.methods import LBYL, NeuronMerging

RATIOS = {"mobilenet_v2_imagenet": (0.05, 0.1, 0.3)}
GRID = tuple(itertools.product((1e-6, 1e-5, 1e-4), (1e-4, 1e-3, 1e-2, 1e-1)))
SEEDS = (0, 1, 2)
STEPS = 100  # of refinement
COLUMNS = (
    "none",
    "neuron-merging",
    "lbyl, best λ",
    "fold",
    "moments",
    "echo",
    "echo, refined",
    "echo, inverted images",
    "echo, real images",
)
PLOTTED = ("none", "neuron-merging", "lbyl, best λ", "fold", "echo", "echo, refined")


def methods() -> Iterator[tuple[str, Any, str, int]]:
    """(column, method, source of statistics, steps of refinement)."""
    yield "none", "none", "procedural", 0
    yield "neuron-merging", NeuronMerging(variant="released"), "procedural", 0
    yield "fold", "fold", "procedural", 0
    yield "moments", "moments", "procedural", 0  # which goes by weights alone
    yield "echo", "echo", "procedural", 0
    yield "echo, refined", "echo", "procedural", STEPS
    yield "echo, inverted images", "echo", "inversion", 0
    yield "echo, real images", "echo", "real", 0


def measure_row(
    case: Case, ratio: float, criterion: str, columns: Sequence[str], seconds: dict[str, float]
) -> dict[str, float]:
    """Accuracies of one line of the table, column → %; random is a mean over seeds.

    Seconds of collecting are entered into `seconds` by source.
    """
    choices: list[Any] = [criterion]
    if criterion == "random":
        choices = [lbyl.criteria.resolve({"name": "random", "seed": seed}) for seed in SEEDS]
    cells: dict[str, float] = {}
    for column, method, source, refine in methods():
        if column not in columns:
            continue
        # Where the criterion has no say, one choice is as good as three.
        chosen = dict.fromkeys(criterion_for(method, choice) for choice in choices)
        accuracies = []
        for choice in chosen:
            result = case.prepared(source).compress(
                {"*": ratio}, criterion=choice, method=method, refine=refine
            )
            accuracies.append(case.accuracy(result.model))
            if result.data is not None:
                seconds[result.data if source == "procedural" else source] = collecting(result)
        cells[column] = sum(accuracies) / len(accuracies)
    if criterion == "l2" and "lbyl, best λ" in columns:
        cells["lbyl, best λ"] = max(best_of_grid(case, ratio))
    return cells


def best_of_grid(case: Case, ratio: float) -> Iterator[float]:
    """Accuracies of the released `lbyl` with L2, for every pair of λ."""
    for lambda1, lambda2 in GRID:
        method = LBYL(lambda1=lambda1, lambda2=lambda2, variant="released")
        result = case.prepared().compress({"*": ratio}, criterion="l2", method=method)
        yield case.accuracy(result.model)


def collecting(result: lbyl.Result) -> float:
    """Seconds that images and statistics took."""
    others = ("trace", "plan", "restore", "refine")
    return sum(value for name, value in result.seconds.items() if name not in others)


def measure(
    case: Case, columns: Sequence[str], earlier: Sequence[dict[str, Any]], only: str | None = None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All lines of a network, and seconds of collecting by source.

    Columns and lines that are not measured now are taken from `earlier`.
    """
    ratios = RATIOS.get(case.name, (0.3, 0.5))
    lines = [(ratio, criterion) for ratio in ratios for criterion in ("l2", "echo")]
    known = {(row["ratio"], row["criterion"]): row for row in earlier}
    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for ratio, criterion in [*lines, (ratios[-1], "random")]:
        before = known.get((ratio, criterion), {})
        row = {**before, "ratio": ratio, "criterion": criterion}
        if only is None or f"{ratio:g}/{criterion}" in only.split(","):
            row |= measure_row(case, ratio, criterion, columns, seconds)
            print(case.name, row, flush=True)
        elif not before:
            continue
        rows.append(row)
    return rows, seconds


def show(name: str, base: float, rows: list[dict[str, Any]]) -> None:
    table = [
        [f"{r['criterion']} {100 * r['ratio']:.0f} %", *(r.get(c) for c in COLUMNS)] for r in rows
    ]
    print_table(f"{name} (base {base:.2f})", ["pruned", *COLUMNS], table)


def plot(networks: dict[str, Any]) -> Any:
    """Accuracy against ratio, a panel per network; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panels = plt.subplots(
        1, len(networks), figsize=(4.2 * len(networks), 3.6), squeeze=False
    )
    for panel, (name, figures) in zip(panels[0], networks.items()):
        rows = [r for r in figures["rows"] if r["criterion"] == "l2"]
        for column in PLOTTED:
            points = [(0.0, figures["base"])]
            points += [(100 * r["ratio"], r[column]) for r in rows if column in r]
            width = 3 if column.startswith("echo") else 1.5
            panel.plot(*zip(*points), "o-", label=column, linewidth=width)
        panel.set_title(name.replace("_", " "))
        panel.set_xlabel("filters removed, %")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy, % (no data)")
    panels[0][0].legend(fontsize=8)
    return figure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument("--small", action="store_true", help="ResNet-20 on 1,000 images")
    parser.add_argument("--columns", help="measure these only, separated by semicolons")
    parser.add_argument("--lines", help="measure these only, such as 0.5/l2,0.3/echo")
    parser.add_argument("--results", type=Path, help="where figures are stored")
    parser.add_argument("--merge", nargs="*", type=Path, default=[], help="JSON of earlier runs")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    names = ["resnet20_cifar10"] if options.small else options.networks.split(",")
    limit = 1000 if options.small else options.limit
    columns = options.columns.split(";") if options.columns else COLUMNS
    networks = merged_networks(options.merge)
    for name in filter(None, names):
        case = load_case(name, options.device, limit)
        earlier = networks.get(name, {}).get("rows", [])
        rows, seconds = measure(case, columns, earlier, options.lines)
        networks[name] = {
            "environment": environment(),
            "base": case.accuracy(case.network.model),
            "images": len(case.test),
            "rows": rows,
            "seconds": seconds,
        }
        del case
    for name, figures in networks.items():
        show(name, figures["base"], figures["rows"])
    stem = "restoration-small" if options.small else "restoration"
    content = {"networks": networks}
    print("stored in", save_results(stem, content, plot(networks), options.results))


if __name__ == "__main__":
    main()
