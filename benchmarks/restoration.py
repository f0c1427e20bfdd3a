"""Accuracy after pruning and restoring, every method side by side, on real networks.

    python benchmarks/restoration.py                 # all networks, full test sets (a GPU helps)
    python benchmarks/restoration.py --small         # minutes on two cores

Prints a table per network and keeps JSON and a plot in docs/results. Real calibration images are
test images used without their labels; everything else needs no data at all. `lbyl` is shown with
the best of a grid of its two hyperparameters, chosen by test accuracy: more than a user could do.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from harness import environment, load_data, load_network, print_table, pyplot, save_results
from lbyl import zoo
from lbyl.io import read_json
from lbyl.ratios import Ratio
from lbyl.statistics.analytic import analytic_statistics

# The layers that published tables prune: convolutions of VGG, inner ones of residual blocks,
# expansions of inverted bottlenecks.
LAYERS: dict[str, dict[str, Any]] = {
    "vgg16_cifar10": {"modules": "features.*"},
    "resnet56_cifar10": {"modules": "layer*"},
    "resnet20_cifar10": {"modules": "layer*"},
    "resnet50_cifar100": {"modules": "layer*"},
    "resnet34_imagenet": {"modules": "layer*"},
    "resnet101_imagenet": {"modules": "layer*"},
    "mobilenet_v2_imagenet": {"modules": [f"features.{i}.conv.0.0" for i in range(2, 18)]},
}
RATIOS = {"mobilenet_v2_imagenet": (0.05, 0.1, 0.3)}
# Those whose weights a person has to bring are run only when named.
NETWORKS = [name for name in LAYERS if name not in ("resnet34_imagenet", "resnet101_imagenet")]
GRID = tuple(itertools.product((1e-6, 1e-5, 1e-4), (1e-4, 1e-3, 1e-2, 1e-1)))
SEEDS = (0, 1, 2)
STEPS = 100  # of refinement


@dataclass
class Bench:
    """One network with its test images on the device, and statistics from each source."""

    name: str
    model: nn.Module
    info: zoo.NetworkInfo
    graph: lbyl.Graph
    example: Tensor
    batches: list[tuple[Tensor, Tensor]]
    statistics: dict[str, lbyl.Statistics] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @torch.inference_mode()
    def accuracy(self, model: nn.Module) -> float:
        hits = total = 0
        for images, labels in self.batches:
            hits += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
        return 100 * hits / total

    def source(self, name: str) -> lbyl.Statistics:
        """Statistics of a source, collected at the first call."""
        if name not in self.statistics:
            start = time.perf_counter()
            if name == "analytic":
                found = analytic_statistics(self.model, self.graph)
            else:
                options: dict[str, Any] = {"graph": self.graph}
                if name == "inversion":
                    options["images"] = "inversion"
                elif name == "real":
                    options["calibration"] = real_images(self)
                found = lbyl.collect(self.model, self.example, **options)
            self.statistics[name] = found
            self.seconds[name] = time.perf_counter() - start
        return self.statistics[name]

    def compress(
        self, ratio: Ratio, criterion: Any, method: Any, source: str, refine: int = 0
    ) -> lbyl.Result:
        """One compression; statistics are handed over so that none is collected twice."""
        return lbyl.compress(
            self.model,
            self.example,
            ratio,
            criterion=criterion,
            method=method,
            graph=self.graph,
            statistics=self.source(source),
            refine=refine,
        )


def real_images(bench: Bench) -> list[Tensor]:
    count = 256 if bench.info.dataset == "ImageNet" else 1024
    images = torch.cat([x for x, _ in bench.batches])[:count]
    return list(images.split(64 if bench.info.dataset == "ImageNet" else 512))


def prepare(name: str, device: str, limit: int | None, weights: Path | None = None) -> Bench:
    model, info = load_network(name, device, weights)
    size = 100 if info.dataset == "ImageNet" else 500
    batches = list(load_data(info).batches(size, info.mean, info.std, device=device, limit=limit))
    example = torch.zeros(1, *info.input_shape, device=device)
    graph = lbyl.trace(model, example, **LAYERS[name])
    return Bench(name, model, info, graph, example, batches)


def methods() -> Iterator[tuple[str, Any, str, int]]:
    """(column, method, source of statistics, steps of refinement)."""
    yield "none", "none", "procedural", 0
    yield "neuron-merging", lbyl.NeuronMerging(variant="released"), "procedural", 0
    yield "fold", "fold", "procedural", 0
    yield "moments", "moments", "analytic", 0
    yield "echo", "echo", "procedural", 0
    yield "echo, refined", "echo", "procedural", STEPS
    yield "echo, inverted images", "echo", "inversion", 0
    yield "echo, real images", "echo", "real", 0


def row(bench: Bench, ratio: float, criterion: str, columns: Sequence[str]) -> dict[str, float]:
    """Accuracies of one line of the table; random is a mean over seeds."""
    choices: list[Any] = [criterion]
    if criterion == "random":
        choices = [lbyl.criteria.resolve({"name": "random", "seed": seed}) for seed in SEEDS]
    cells: dict[str, float] = {}
    for column, method, source, refine in methods():
        if column not in columns:
            continue
        once = lbyl.methods.resolve(method).chooses  # then the criterion has no say
        found = [
            bench.accuracy(bench.compress(ratio, choice, method, source, refine).model)
            for choice in (choices[:1] if once else choices)
        ]
        cells[column] = sum(found) / len(found)
    if criterion == "l2" and "lbyl, best λ" in columns:
        tried = [
            bench.accuracy(
                bench.compress(
                    ratio, choices[0], lbyl.LBYL(*pair, variant="released"), "procedural"
                ).model
            )
            for pair in GRID
        ]
        cells["lbyl, best λ"] = max(tried)
    return cells


def measure(
    bench: Bench, columns: Sequence[str], earlier: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All lines of a network; columns that are not measured now are taken from `earlier`."""
    ratios = RATIOS.get(bench.name, (0.3, 0.5))
    lines = [(ratio, criterion) for ratio in ratios for criterion in ("l2", "echo")]
    known = {(r["ratio"], r["criterion"]): r for r in earlier}
    rows = []
    for ratio, criterion in [*lines, (ratios[-1], "random")]:
        found = row(bench, ratio, criterion, columns)
        before = known.get((ratio, criterion), {})
        rows.append({**before, "ratio": ratio, "criterion": criterion, **found})
        print(bench.name, rows[-1], flush=True)
    return rows


COLUMNS = ("none", "neuron-merging", "lbyl, best λ", "fold", "moments", "echo")
COLUMNS += ("echo, refined", "echo, inverted images", "echo, real images")


def show(name: str, base: float, rows: list[dict[str, Any]]) -> None:
    table = [
        [f"{r['criterion']} {100 * r['ratio']:.0f} %", *(r.get(c) for c in COLUMNS)] for r in rows
    ]
    print_table(f"{name} (base {base:.2f})", ["pruned", *COLUMNS], table)


def plot(results: dict[str, Any]) -> Any:
    """Accuracy against ratio, a panel per network; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panels = plt.subplots(1, len(results), figsize=(4.2 * len(results), 3.6), squeeze=False)
    for panel, (name, found) in zip(panels[0], results.items()):
        rows = [r for r in found["rows"] if r["criterion"] == "l2"]
        for column in ("none", "neuron-merging", "lbyl, best λ", "fold", "echo", "echo, refined"):
            points = [(0.0, found["base"])] + [(r["ratio"], r[column]) for r in rows if column in r]
            panel.plot(
                [100 * x for x, _ in points],
                [y for _, y in points],
                "o-",
                label=column,
                linewidth=3 if column.startswith("echo") else 1.5,
            )
        panel.set_title(name.replace("_", " "))
        panel.set_xlabel("filters removed, %")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy, % (no data)")
    panels[0][0].legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument("--small", action="store_true", help="ResNet-20 on 1,000 images")
    parser.add_argument("--columns", help="measure these only, separated by semicolons")
    parser.add_argument("--merge", nargs="*", type=Path, help="JSON of earlier runs to add")
    options = parser.parse_args()
    names = ["resnet20_cifar10"] if options.small else options.networks.split(",")
    limit = 1000 if options.small else options.limit
    results: dict[str, Any] = {}
    for path in options.merge or []:
        earlier = read_json(path)
        for name, found in earlier["networks"].items():
            results[name] = {"environment": earlier["environment"], **found}
    for name in filter(None, names):
        bench = prepare(name, options.device, limit)
        base = bench.accuracy(bench.model)
        columns = options.columns.split(";") if options.columns else COLUMNS
        rows = measure(bench, columns, results.get(name, {}).get("rows", []))
        results[name] = {
            "environment": environment(),
            "base": base,
            "images": sum(len(y) for _, y in bench.batches),
            "rows": rows,
            "seconds": bench.seconds,
        }
        del bench
    for name, found in results.items():
        show(name, found["base"], found["rows"])
    kept = "restoration-small" if options.small else "restoration"
    print("kept in", save_results(kept, {"networks": results}, plot(results)))


if __name__ == "__main__":
    main()
