"""The paper's table on LeNet-300-100 and FashionMNIST, its figures beside ours.

``python benchmarks/lenet_fashionmnist.py [--data DIR] [--weights FILE]``

`--data` takes the folder given to `torchvision.datasets.FashionMNIST`, or the folder of its idx
files. The columns Prune, NM and LBYL are the published code's variants, whose λ by row the paper
prints; coreset, theorem and echo are computed as this library defines them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

import lbyl
from harness import load_data, load_network, print_table, save_results
from lbyl.data import ImageSet, evaluate
from lbyl.zoo import NetworkInfo

NETWORK = "lenet300_100_fashionmnist"
RATIOS = (0.5, 0.6, 0.7, 0.8)
CRITERIA = ("l2", "l2-gm", "l1")
SEEDS = 5

# (ratio, criterion) → λ, from the paper's appendix.
STRENGTHS = {
    (0.5, "l2"): 0.3,
    (0.5, "l2-gm"): 1.2,
    (0.5, "l1"): 0.7,
    (0.6, "l2"): 0.6,
    (0.6, "l2-gm"): 0.5,
    (0.6, "l1"): 0.8,
    (0.7, "l2"): 0.3,
    (0.7, "l2-gm"): 1.3,
    (0.7, "l1"): 0.2,
    (0.8, "l2"): 1e-6,
    (0.8, "l2-gm"): 0.003,
    (0.8, "l1"): 0.3,
}

# ratio → the paper's accuracies, criteria in the order of CRITERIA.
PAPER: dict[str, dict[float, tuple[float, float, float]]] = {
    "none": {
        0.5: (87.86, 88.08, 88.40),
        0.6: (83.03, 85.82, 85.17),
        0.7: (71.21, 78.38, 71.26),
        0.8: (63.90, 64.19, 66.76),
    },
    "neuron-merging": {
        0.5: (87.86, 88.57, 88.69),
        0.6: (88.07, 88.10, 86.92),
        0.7: (83.27, 86.39, 82.75),
        0.8: (77.11, 77.49, 80.02),
    },
    "lbyl": {
        0.5: (88.83, 88.69, 89.03),
        0.6: (87.75, 88.15, 87.55),
        0.7: (83.92, 85.92, 84.57),
        0.8: (78.05, 77.63, 80.55),
    },
}
PAPER_CORESET = {0.5: 79.34, 0.6: 69.41, 0.7: 62.31, 0.8: 49.68}

Measure = Callable[[nn.Module], float]


class Table:
    """Accuracies of one network, every method from one trace and one collection."""

    def __init__(self, model: nn.Module, info: NetworkInfo, images: ImageSet) -> None:
        self.model, self.info, self.images = model, info, images
        self.example = torch.zeros(1, *info.input_shape)
        self.graph = lbyl.trace(model, self.example)
        self.statistics = lbyl.collect(model, self.example, graph=self.graph)

    def base(self) -> float:
        return evaluate(self.info, self.model, self.images)

    def cell(self, ratio: float, criterion: str, method: Any) -> float:
        """Accuracy after compression; only echo looks at the statistics."""
        result = lbyl.compress(
            self.model,
            self.example,
            ratio,
            criterion=criterion,
            method=method,
            graph=self.graph,
            statistics=self.statistics,
        )
        return evaluate(self.info, result.model, self.images)

    def coreset(self, ratio: float) -> float:
        """Mean over seeds; the method draws its own neurons."""
        cells = [self.cell(ratio, "l2", lbyl.Coreset(seed=seed)) for seed in range(SEEDS)]
        return sum(cells) / len(cells)


def published(ratio: float, criterion: str) -> dict[str, Any]:
    """The three methods of the paper's table as its authors' code computes them."""
    strength = STRENGTHS[ratio, criterion]
    return {
        "none": "none",
        "neuron-merging": lbyl.NeuronMerging(variant="released"),
        "lbyl": lbyl.LBYL(lambda2=strength, variant="released"),
    }


def published_cells(table: Table) -> Iterator[tuple[float, str, str, float, float]]:
    """Ratio, criterion, method, the paper's figure and ours: 36 cells."""
    for ratio in RATIOS:
        for place, criterion in enumerate(CRITERIA):
            for name, method in published(ratio, criterion).items():
                ours = table.cell(ratio, criterion, method)
                yield ratio, criterion, name, PAPER[name][ratio][place], ours


def extra_cells(table: Table) -> Iterator[tuple[float, str, str, float | None, float]]:
    """Columns that the paper does not have, or, for the coreset, has without saying how drawn."""
    for ratio in RATIOS:
        yield ratio, "own", "coreset", PAPER_CORESET[ratio], table.coreset(ratio)
        for criterion in CRITERIA:
            theorem = lbyl.LBYL(lambda2=STRENGTHS[ratio, criterion])
            yield ratio, criterion, "lbyl theorem", None, table.cell(ratio, criterion, theorem)
            yield ratio, criterion, "echo", None, table.cell(ratio, criterion, "echo")


def show(base: float, cells: list[dict[str, Any]]) -> None:
    found = {(c["ratio"], c["criterion"], c["method"]): c for c in cells}
    methods = ["none", "neuron-merging", "lbyl", "lbyl theorem", "echo"]
    columns = ["ratio", "criterion", "none", "paper", "NM", "paper", "LBYL", "paper"]
    rows = []
    for ratio in RATIOS:
        for criterion in CRITERIA:
            row: list[Any] = [f"{ratio:.0%}", criterion]
            for method in methods:
                cell = found[ratio, criterion, method]
                row += [cell["ours"], cell["paper"]] if method in PAPER else [cell["ours"]]
            rows.append(row)
    title = f"LeNet-300-100, FashionMNIST, accuracy in % (unpruned {base:.2f})"
    print_table(title, [*columns, "LBYL theorem", "echo"], rows)
    coreset = [found[ratio, "own", "coreset"] for ratio in RATIOS]
    print_table(
        f"Coreset, mean of {SEEDS} seeds",
        ["ratio", "ours", "paper"],
        [[f"{c['ratio']:.0%}", c["ours"], c["paper"]] for c in coreset],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="FashionMNIST as torchvision or as idx files hold it")
    parser.add_argument("--weights", help="state dict of the network")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, info = load_network(NETWORK, weights=options.weights)
    table = Table(model, info, load_data(info, path=options.data))
    total = len(RATIOS) * (len(CRITERIA) * 5 + 1)
    cells: list[dict[str, Any]] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("compressing", total=total)
        for part in (published_cells, extra_cells):
            for ratio, criterion, method, paper, ours in part(table):
                cells.append(
                    {
                        "ratio": ratio,
                        "criterion": criterion,
                        "method": method,
                        "paper": paper,
                        "ours": round(ours, 2),
                    }
                )
                bar.advance(task)
    base = table.base()
    show(base, cells)
    print("kept in", save_results("lenet_fashionmnist", {"base": base, "cells": cells}))


if __name__ == "__main__":
    main()
