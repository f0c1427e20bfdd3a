"""The paper's large tables: every criterion, ratio and method, and what predicts the accuracy.

    python -m benchmarks.criteria [--networks vgg16_cifar10,...] [--jobs 8]
    python -m benchmarks.criteria --networks resnet34_imagenet --weights resnet34-b627a593.pth
    python -m benchmarks.criteria --small      # ResNet-20, minutes on two cores

`lbyl` and `neuron-merging` are the published code's variants with the hyperparameters that the
paper prints for each cell; `lbyl, theorem` has the same. Beside each accuracy stand RE, BE and
WARE (predicted without data, and from real images), so that their rank correlation with the
accuracy over all settings can be told.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lbyl
from benchmarks.common import paper
from benchmarks.common.environment import default_device, results_dir
from benchmarks.common.jobs import Ledger, matching, run_parallel
from benchmarks.common.networks import Case, load_case
from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_figure, save_results
from benchmarks.common.tables import print_table
from lbyl.graph.weights import unit_weights
from lbyl.methods import LBYL, Method, NeuronMerging
from lbyl.rivals.errors import error_terms, moment_ware

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
COLUMNS = (
    "none",
    "neuron-merging",
    "one-to-one",
    "lbyl",
    "lbyl, theorem",
    "coreset",
    "fold",
    "moments",
    "echo",
    "echo, real images",
)


def methods(network: str, criterion: str, ratio: float) -> Iterator[tuple[str, Any, str]]:
    """(column, method, source of statistics) with the paper's hyperparameters for this cell."""
    if criterion == "own":
        yield from ((name, name, "procedural") for name in CHOOSING)
        return
    first, second = _cell(paper.LAMBDAS, network, criterion, ratio) or OTHERWISE
    threshold, balance = _cell(paper.MERGING, network, criterion, ratio) or (0.1, 0.85)
    merging = NeuronMerging(balance=balance, threshold=threshold, variant="released")
    yield "none", "none", "procedural"
    yield "neuron-merging", merging, "procedural"
    yield "one-to-one", "one-to-one", "procedural"
    yield "lbyl", LBYL(lambda1=first, lambda2=second, variant="released"), "procedural"
    yield "lbyl, theorem", LBYL(lambda1=first, lambda2=second, variant="theorem"), "procedural"
    yield "moments", "moments", "analytic"
    yield "echo", "echo", "procedural"
    yield "echo, real images", "echo", "real"


def _cell(table: Any, network: str, criterion: str, ratio: float) -> Any:
    cells = table.get(network, {}).get(criterion)
    return cells[paper.RATIOS.index(ratio)] if cells and ratio in paper.RATIOS else None


def settings(networks: list[str]) -> list[str]:
    """network/criterion, those that take long first."""
    keys = [
        f"{network}/{criterion}"
        for network in networks
        for criterion in ("own", *CRITERIA.get(network, (*PLAIN, *paper.RANDOM)))
    ]
    return sorted(keys, key=lambda key: "resnet50" not in key)


def measure(
    case: Case, criterion: str, columns: Sequence[str], earlier: dict[str, Any]
) -> dict[str, Any]:
    """All ratios of one criterion, ratio → column → figures, on top of `earlier` ones."""
    rows: dict[str, Any] = {}
    for ratio in RATIOS.get(case.name, paper.RATIOS):
        cells = dict(earlier.get(f"{ratio:g}", {}))
        for column, method, source in methods(case.name, criterion, ratio):
            if column not in columns:
                continue
            # Analytic statistics are what a method takes by itself where no data are given.
            prepared = case.prepared("procedural" if source == "analytic" else source)
            choice = None if criterion == "own" else criterion
            result = prepared.compress({"*": ratio}, criterion=choice, method=method)
            cells[column] = {
                "accuracy": case.accuracy(result.model),
                **errors_of(case, result.plan, lbyl.methods.resolve(method), source),
            }
        rows[f"{ratio:g}"] = cells
        print(case.name, criterion, ratio, _brief(cells), flush=True)
    return rows


def _brief(cells: dict[str, Any]) -> str:
    return ", ".join(f"{name} {cell['accuracy']:.2f}" for name, cell in cells.items())


def errors_of(case: Case, plan: lbyl.Plan, method: Method, source: str) -> dict[str, float]:
    """Means over layers: RE, BE and ‖s‖ of the delivery matrix; WARE of procedural and real images.

    Of methods that write no single matrix it is that of their `deliver`.
    """
    weights = unit_weights(case.prepared().graph, case.network.model)
    sums = dict.fromkeys(("ware", "real ware", "re", "be", "norm"), 0.0)
    for name, kept in plan.kept.items():
        matrix = method.deliver(weights[name], kept, case.statistics(source)).matrix
        terms = error_terms(weights[name], kept, matrix)
        for key, seen in (("ware", "procedural"), ("real ware", "real")):
            sums[key] += moment_ware(weights[name], kept, matrix, case.statistics(seen))
        sums["re"] += terms.residual
        sums["be"] += terms.bias
        sums["norm"] += terms.norm
    return {key: value / len(plan.kept) for key, value in sums.items()}


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
    ranks = {f"{name} → accuracy": -spearman(g, accuracy) for name, g in guesses.items()}
    for name in list(guesses)[:2]:
        ranks[f"{name} → real WARE"] = spearman(guesses[name], real)
    return {**ranks, "settings": len(cells)}


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
            merged = [{**part[ratio], **own.get(ratio, {})} for part in parts]
            lines[f"{criterion} {100 * float(ratio):.0f} %"] = {
                column: sum(cells[column]["accuracy"] for cells in merged) / len(merged)
                for column in COLUMNS
                if column in merged[0]
            } | _printed(network, criterion, ratio)
    return lines


def _printed(network: str, criterion: str, ratio: str) -> dict[str, float]:
    """What the paper has for this line."""
    figures = paper.ACCURACY.get(network, {}).get(criterion, {})
    index = RATIOS.get(network, paper.RATIOS).index(float(ratio))
    return {f"paper: {m}": v[index] for m, v in figures.items() if index < len(v)}


def show(runs: dict[str, Any], networks: list[str]) -> None:
    printed = [f"paper: {m}" for m in ("none", "neuron-merging", "lbyl")]
    for network in networks:
        lines = table(runs, network)
        rows = [
            [line, *(cells.get(c) for c in (*COLUMNS, *printed))] for line, cells in lines.items()
        ]
        if rows:
            print_table(network, ["pruned", *COLUMNS, *printed], rows)
            ranks = [[name, value] for name, value in correlations(runs, network).items()]
            print_table(f"{network}: rank correlation", ["", "ρ"], ranks)


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument("--weights", type=Path, help="of the network, where one alone is named")
    parser.add_argument("--small", action="store_true", help="ResNet-20 on 1,000 images")
    parser.add_argument("--jobs", type=int, default=1, help="settings that run at once")
    parser.add_argument("--seconds", type=float, help="stop what is not finished by then")
    parser.add_argument("--columns", help="measure these anew, separated by semicolons")
    parser.add_argument("--only", help="settings by pattern, such as '*/l2'")
    parser.add_argument("--results", type=Path, default=results_dir())
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "lbyl-runs")
    options = parser.parse_args()
    if options.small:
        options.networks, options.limit = "resnet20_cifar10", 1000
    return options


def work(options: argparse.Namespace, ledger: Ledger, key: str) -> None:
    """Measure one setting and store it."""
    network, criterion = key.split("/")
    columns = options.columns.split(";") if options.columns else COLUMNS
    case = load_case(network, options.device, options.limit, options.weights)
    ledger.store(key, measure(case, criterion, columns, ledger.runs.get(key, {})))


def run_missing(options: argparse.Namespace, ledger: Ledger, keys: list[str]) -> None:
    """Measure what is not there; named columns anew, beside what is known already."""
    ledger.refresh(keys)
    missing = [key for key in keys if options.columns or key not in ledger.runs]
    task = functools.partial(work, options, ledger)
    if options.jobs > 1:
        run_parallel(task, missing, options.jobs, options.seconds)
    else:
        for key in missing:
            task(key)
    ledger.refresh(keys, missing)


def main() -> None:
    options = arguments()
    name = "criteria-small" if options.small else "criteria"
    ledger = Ledger(name, {"limit": options.limit}, options.scratch)
    ledger.adopt(options.results / f"{name}.json")
    keys = matching(settings(options.networks.split(",")), options.only)
    run_missing(options, ledger, keys)
    every = settings(list(dict.fromkeys(key.split("/")[0] for key in [*ledger.runs, *keys])))
    networks = list(dict.fromkeys(key.split("/")[0] for key in every))
    show(ledger.runs, networks)
    content = ledger.to_dict(every)
    content["correlations"] = {
        n: correlations(ledger.runs, n) for n in networks if table(ledger.runs, n)
    }
    path = save_results(name, content, plot(ledger.runs, networks), options.results)
    picture = summary(ledger.runs, networks)
    if picture is not None:
        save_figure(options.results / f"{name}-summary.png", picture)
    print("stored in", path)


if __name__ == "__main__":
    # Worker processes import functions by the name of their module, which is not __main__.
    from benchmarks import criteria

    criteria.main()
