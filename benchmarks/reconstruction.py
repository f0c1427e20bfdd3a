"""Layer-wise reconstruction errors of the methods, the paper's error-component figure.

    python benchmarks/reconstruction.py [--network resnet50_cifar100] [--ratio 0.3]

RE and BE come from weights, WARE from the moments of channels on procedural images; no data.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import lbyl
from harness import load_network, print_table, pyplot, save_results
from restoration import LAYERS

METHODS = (
    lbyl.NeuronMerging(variant="released"),
    lbyl.LBYL(lambda1=1e-5, lambda2=2e-3, variant="released"),
    lbyl.Echo(),
)
PARTS = {"residual": "RE", "bias": "BE", "ware": "WARE", "norm": "mean ‖s‖"}


def plot(found: lbyl.Estimate, network: str, ratio: float) -> Any:
    """A panel per part of the error, a line per method; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panels = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True)
    for panel, (part, title) in zip(panels.flat, PARTS.items()):
        for method in METHODS:
            values = [getattr(r, part) for r in found.rows if r.method == method.name]
            panel.plot(values, "o-", markersize=3, label=method.name)
        panel.set_title(title)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    for panel in panels[1]:
        panel.set_xlabel("layer, from the input on")
    figure.suptitle(f"{network}, {100 * ratio:.0f} % removed by L2")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet50_cifar100", choices=list(LAYERS))
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    model, info = load_network(options.network, options.device)
    example = torch.zeros(1, *info.input_shape, device=options.device)
    graph = lbyl.trace(model, example, **LAYERS[options.network])
    found = lbyl.estimate(model, example, (options.ratio,), methods=METHODS, graph=graph)
    means = [[m.name, *(_mean(found, m.name, part) for part in PARTS)] for m in METHODS]
    title = f"{options.network}, {100 * options.ratio:.0f} %, mean over {len(graph)} layers"
    print_table(title, ["method", *PARTS.values()], means)
    figure = plot(found, options.network, options.ratio)
    data = {"network": options.network, "ratio": options.ratio, **found.to_dict()}
    print("kept in", save_results("reconstruction", data, figure))


def _mean(found: lbyl.Estimate, method: str, part: str) -> float:
    values = [getattr(r, part) for r in found.rows if r.method == method]
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
