"""The paper's table on LeNet-300-100 and FashionMNIST, its figures beside ours.

    python -m benchmarks.lenet_fashionmnist [--data DIR] [--weights FILE]

`--data` takes the folder given to `torchvision.datasets.FashionMNIST`, or the folder of its idx
files. The columns Prune, NM and LBYL are the published code's variants, whose λ by row the paper
prints; coreset, theorem and echo are computed as this library defines them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.common.networks import Case, LabelledImages, load_images, load_network
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from lbyl.methods import LBYL, Coreset, NeuronMerging

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

Cell = tuple[float, str, str, float | None, float]


def load(data: str | None = None, weights: str | None = None) -> Case:
    """The network and FashionMNIST's test images."""
    network = load_network(NETWORK, weights=weights)
    return Case(NETWORK, network, LabelledImages.of(load_images(NETWORK, path=data), network))


def accuracy(case: Case, ratio: float, criterion: str | None, method: Any) -> float:
    """Accuracy after compression; only echo looks at statistics."""
    return case.accuracy(
        case.prepared().compress({"*": ratio}, criterion=criterion, method=method).model
    )


def coreset(case: Case, ratio: float) -> float:
    """Mean over seeds; the method draws its own neurons."""
    return sum(accuracy(case, ratio, None, Coreset(seed=seed)) for seed in range(SEEDS)) / SEEDS


def published(ratio: float, criterion: str) -> dict[str, Any]:
    """The three methods of the paper's table as its authors' code computes them."""
    strength = STRENGTHS[ratio, criterion]
    return {
        "none": "none",
        "neuron-merging": NeuronMerging(variant="released"),
        "lbyl": LBYL(lambda2=strength, variant="released"),
    }


def published_cells(case: Case) -> Iterator[Cell]:
    """Ratio, criterion, method, the paper's figure and ours: 36 cells."""
    for ratio in RATIOS:
        for index, criterion in enumerate(CRITERIA):
            for name, method in published(ratio, criterion).items():
                ours = accuracy(case, ratio, criterion, method)
                yield ratio, criterion, name, PAPER[name][ratio][index], ours


def extra_cells(case: Case) -> Iterator[Cell]:
    """Columns that the paper does not have, or, for the coreset, has without saying how drawn."""
    for ratio in RATIOS:
        yield ratio, "own", "coreset", PAPER_CORESET[ratio], coreset(case, ratio)
        for criterion in CRITERIA:
            theorem = LBYL(lambda2=STRENGTHS[ratio, criterion])
            ours = accuracy(case, ratio, criterion, theorem)
            yield ratio, criterion, "lbyl theorem", None, ours
            yield ratio, criterion, "echo", None, accuracy(case, ratio, criterion, "echo")


def measure(case: Case) -> list[dict[str, Any]]:
    """Every cell as plain data, with a bar while it takes."""
    cells: list[dict[str, Any]] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("compressing", total=len(RATIOS) * (len(CRITERIA) * 5 + 1))
        for part in (published_cells, extra_cells):
            for ratio, criterion, method, paper, ours in part(case):
                cell = {"ratio": ratio, "criterion": criterion, "method": method}
                cells.append({**cell, "paper": paper, "ours": round(ours, 2)})
                bar.advance(task)
    return cells


def show(base: float, cells: list[dict[str, Any]]) -> None:
    by_key = {(c["ratio"], c["criterion"], c["method"]): c for c in cells}
    methods = ["none", "neuron-merging", "lbyl", "lbyl theorem", "echo"]
    columns = ["ratio", "criterion", "none", "paper", "NM", "paper", "LBYL", "paper"]
    rows = []
    for ratio in RATIOS:
        for criterion in CRITERIA:
            row: list[Any] = [f"{ratio:.0%}", criterion]
            for method in methods:
                cell = by_key[ratio, criterion, method]
                row += [cell["ours"], cell["paper"]] if method in PAPER else [cell["ours"]]
            rows.append(row)
    title = f"LeNet-300-100, FashionMNIST, accuracy in % (unpruned {base:.2f})"
    print_table(title, [*columns, "LBYL theorem", "echo"], rows)
    own = [by_key[ratio, "own", "coreset"] for ratio in RATIOS]
    print_table(
        f"Coreset, mean of {SEEDS} seeds",
        ["ratio", "ours", "paper"],
        [[f"{c['ratio']:.0%}", c["ours"], c["paper"]] for c in own],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="FashionMNIST as torchvision or as idx files hold it")
    parser.add_argument("--weights", help="state dict of the network")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = load(options.data, options.weights)
    cells = measure(case)
    base = case.accuracy(case.network.model)
    show(base, cells)
    print("stored in", save_results("lenet_fashionmnist", {"base": base, "cells": cells}))


if __name__ == "__main__":
    main()
