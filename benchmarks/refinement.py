"""Accuracy against seconds of refinement, and what recording a step gains.

    python -m benchmarks.refinement [--networks vgg16_cifar10,...] [--limit 4000]
    python -m benchmarks.refinement --speed       # steps a second on ResNet-50 at 224 px

Half of every network is pruned (30 % of MobileNet-V2's expansions), criterion echo, and refined on
procedural or on inverted images. Data-free; test images measure. `--speed` takes the same steps
recorded and one by one, in one run; the weights are random, which changes no time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import torch

import lbyl
from benchmarks.common.environment import default_device
from benchmarks.common.networks import Case, load_case
from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from lbyl.refining.distil import Steps

NETWORKS = ("vgg16_cifar10", "resnet56_cifar10", "resnet50_cifar100", "mobilenet_v2_imagenet")
RATIOS = {"mobilenet_v2_imagenet": 0.3}  # 0.5 for all others
STEPS: tuple[Steps, ...] = (0, 30, 100, 300, 1000, "auto")
SHORT, LONG = 20, 120  # steps that are timed: what they differ by is free of what both have

Row = dict[str, Any]


def measure(case: Case, source: str) -> list[Row]:
    """A row for every number of steps."""
    prepared = case.prepared(source)
    plain = prepared.compress({"*": RATIOS.get(case.name, 0.5)}, criterion="echo")
    prepared.refine(plain, 8)  # libraries load their kernels once, and that is timed nowhere
    rows = []
    for steps in STEPS:
        start = time.perf_counter()
        result = prepared.refine(plain, steps) if steps else plain
        synchronise()
        rows.append(
            {
                "images": source,
                "steps": steps,
                "taken": result.refinement.steps if result.refinement else 0,
                "seconds": time.perf_counter() - start if steps else 0.0,
                "accuracy": case.accuracy(result.model),
            }
        )
        print(case.name, rows[-1], flush=True)
    return rows


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(device: str) -> dict[str, float]:
    """Steps a second on ResNet-50 at 224 px, recorded and not."""
    import torchvision

    model = torchvision.models.resnet50().to(device).eval()
    prepared = lbyl.prepare(model, torch.zeros(1, 3, 224, 224, device=device))
    plain = prepared.compress({"*": 0.5}, criterion="l2")

    def rate() -> float:
        seconds = []
        for steps in (SHORT, LONG):
            start = time.perf_counter()
            prepared.refine(plain, steps)
            synchronise()
            seconds.append(time.perf_counter() - start)
        return (LONG - SHORT) / (seconds[1] - seconds[0])

    prepared.refine(plain, 8)
    recorded = rate()
    with mock.patch("lbyl.runtime.recording.record", lambda run, inputs: None):
        one_by_one = rate()
    return {"recorded": recorded, "one by one": one_by_one}


def drawn(networks: dict[str, Any]) -> Any:
    """Accuracy against seconds, a panel for each network."""
    plt = pyplot()
    if plt is None:
        return None
    figure, axes = plt.subplots(1, len(networks), figsize=(4 * len(networks), 3.2), squeeze=False)
    for panel, (name, figures) in zip(axes[0], networks.items()):
        for source in dict.fromkeys(row["images"] for row in figures["rows"]):
            rows = [r for r in figures["rows"] if r["images"] == source and r["steps"] != "auto"]
            xs, ys = [r["seconds"] for r in rows], [r["accuracy"] for r in rows]
            (line,) = panel.plot(xs, ys, marker="o", label=f"{source} images")
            auto = [r for r in figures["rows"] if r["images"] == source and r["steps"] == "auto"]
            for row in auto:
                panel.plot(
                    row["seconds"], row["accuracy"], marker="*", ms=12, color=line.get_color()
                )
        panel.axhline(figures["base"], color="grey", linestyle=":")
        panel.set(title=name, xlabel="seconds of refinement", ylabel="accuracy, %")
    axes[0][0].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--images", default="procedural,inversion")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--limit", type=int)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    if options.speed:
        rates = speed(options.device)
        print_table("Steps a second", list(rates), [list(rates.values())])
        save_results("refinement-speed", {"steps a second": rates})
        return
    networks = {}
    for name in options.networks.split(","):
        case = load_case(name, options.device, options.limit)
        rows = [row for source in options.images.split(",") for row in measure(case, source)]
        networks[name] = {"base": case.accuracy(case.network.model), "rows": rows}
        save_results("refinement", {"networks": networks}, drawn(networks))
        table = [[r["images"], r["steps"], r["taken"], r["seconds"], r["accuracy"]] for r in rows]
        print_table(name, ["images", "steps", "taken", "seconds", "accuracy"], table)


if __name__ == "__main__":
    main()
