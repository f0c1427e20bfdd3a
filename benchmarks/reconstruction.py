"""Layer-wise reconstruction errors of the methods, the paper's error-component figure.

    python -m benchmarks.reconstruction [--network resnet50_cifar100] [--ratio 0.3]

RE and BE come from weights, WARE from the moments of channels on procedural images; no data.
"""

from __future__ import annotations

import argparse
from typing import Any

import lbyl
from benchmarks.common.environment import default_device
from benchmarks.common.networks import LAYERS, load_network
from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from lbyl.methods import LBYL, Echo, NeuronMerging
from lbyl.rivals.errors import LayerErrors, layer_errors

METHODS = (
    NeuronMerging(variant="released"),
    LBYL(lambda1=1e-5, lambda2=2e-3, variant="released"),
    Echo(),
)
PARTS = {"residual": "RE", "bias": "BE", "ware": "WARE", "norm": "mean ‖s‖"}


def plot(errors: LayerErrors, network: str, ratio: float) -> Any:
    """A panel per part of the error, a line per method; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panels = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True)
    for panel, (part, title) in zip(panels.flat, PARTS.items()):
        for method in METHODS:
            values = [getattr(r, part) for r in errors.rows if r.method == method.name]
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
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args()
    network = load_network(options.network, options.device)
    prepared = lbyl.prepare(network.model, network.example, include=LAYERS[options.network])
    errors = layer_errors(prepared, (options.ratio,), methods=METHODS)
    means = [[m.name, *(_mean(errors, m.name, part) for part in PARTS)] for m in METHODS]
    title = (
        f"{options.network}, {100 * options.ratio:.0f} %, mean over {len(prepared.graph)} layers"
    )
    print_table(title, ["method", *PARTS.values()], means)
    figure = plot(errors, options.network, options.ratio)
    data = {"network": options.network, "ratio": options.ratio, **errors.to_dict()}
    print("stored in", save_results("reconstruction", data, figure))


def _mean(errors: LayerErrors, method: str, part: str) -> float:
    values = [getattr(r, part) for r in errors.rows if r.method == method]
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
