"""Global adaptive pruning: each layer loses filters until its error would pass a threshold.

    python -m benchmarks.adaptive              # ResNet-50/CIFAR-100, thresholds 0.1, 0.3, 0.5
    python -m benchmarks.adaptive --small        # ResNet-20 on 1,000 images, two cores

Each layer's ratio grows by 10 % as long as its weighted average reconstruction error (WARE) stays
within the threshold, and no further than 50 %: the paper's three methods end at one and the same
size under threshold 0.5, which is the size that 50 % everywhere gives. WARE is told without data,
from procedural images, and beside it from real ones.
"""

from __future__ import annotations

import argparse
from typing import Any

import lbyl
from benchmarks.common import paper
from benchmarks.common.environment import default_device
from benchmarks.common.networks import Case, load_case
from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from lbyl.methods import LBYL, NeuronMerging
from lbyl.rivals.errors import LayerErrors, allowed, layer_errors

THRESHOLDS = (0.1, 0.3, 0.5)
STEP, MOST = 0.1, 0.5
LAMBDA1, LAMBDA2 = paper.LAMBDAS["resnet50_cifar100"]["l2"][2]
# LBYL's λ: what the paper prints for ResNet-50/CIFAR-100 at 30 %, for every step alike.
METHODS: dict[str, Any] = {
    "none": "none",
    "neuron-merging": NeuronMerging(variant="released"),
    "lbyl": LBYL(lambda1=LAMBDA1, lambda2=LAMBDA2, variant="released"),
    "echo": "echo",
}


def adaptive_ratios(prepared: lbyl.Prepared, method: Any, threshold: float) -> dict[str, float]:
    """For every layer the largest ratio whose WARE, and that of all smaller ones, is allowed."""
    return allowed(predicted(prepared, method), threshold)


def predicted(prepared: lbyl.Prepared, method: Any) -> LayerErrors:
    """The errors of every layer at every step, which serve all thresholds."""
    steps = tuple(round(STEP * i, 2) for i in range(1, round(MOST / STEP) + 1))
    return layer_errors(prepared, steps, methods=(method,))


def measure(case: Case) -> list[dict[str, Any]]:
    """A row for every source of WARE, threshold and method."""
    rows = []
    for source in ("procedural", "real"):
        errors = {n: predicted(case.prepared(source), m) for n, m in METHODS.items()}
        for threshold in THRESHOLDS:
            for name, method in METHODS.items():
                ratios = allowed(errors[name], threshold)
                result = case.prepared().compress(ratios, criterion="l2", method=method)
                figures = {
                    "accuracy": case.accuracy(result.model),
                    "parameters": result.after.parameters,
                    "macs": result.after.macs,
                }
                line = {"WARE": source, "threshold": threshold, "method": name}
                rows.append({**line, **figures, "ratios": ratios})
                print(line, figures, flush=True)
    return rows


def show(network: str, rows: list[dict[str, Any]]) -> None:
    table = []
    for row in rows:
        line = [row["threshold"], row["WARE"], row["method"], row["accuracy"]]
        line += [row["parameters"] / 1e6, row["macs"] / 1e9]
        printed = paper.ADAPTIVE[row["threshold"]].get(row["method"])
        beside = printed if network == "resnet50_cifar100" else None
        table.append([*line, *(beside or (None, None, None))])
    columns = ["threshold", "WARE from", "method", "accuracy", "M params", "GMACs"]
    columns += ["paper: accuracy", "M params", "GMACs"]
    print_table(f"{network}, global adaptive pruning", columns, table)


def plot(network: str, base: float, rows: list[dict[str, Any]]) -> Any:
    """Accuracy against multiply–accumulates; None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panel = plt.subplots(figsize=(6, 4))
    for name in METHODS:
        for source, style in (("procedural", "o-"), ("real", "s--")):
            mine = [r for r in rows if r["method"] == name and r["WARE"] == source]
            colour = f"C{list(METHODS).index(name)}"
            label = f"{name}, WARE {'without data' if source == 'procedural' else 'of real images'}"
            x, y = [r["macs"] / 1e9 for r in mine], [r["accuracy"] for r in mine]
            panel.plot(x, y, style, color=colour, label=label)
    panel.axhline(base, color="grey", lw=0.8)
    panel.set_xlabel("GMACs")
    panel.set_ylabel("accuracy, %")
    panel.set_title(f"{network}: ratios by layer from WARE thresholds", fontsize=10)
    panel.legend(fontsize=7)
    panel.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet50_cifar100")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument("--small", action="store_true", help="ResNet-20 on 1,000 images")
    options = parser.parse_args()
    network = "resnet20_cifar10" if options.small else options.network
    case = load_case(network, options.device, 1000 if options.small else options.limit)
    base, rows = case.accuracy(case.network.model), measure(case)
    show(network, rows)
    data = {"network": network, "base": base, "rows": rows}
    name = "adaptive-small" if options.small else "adaptive"
    print("stored in", save_results(name, data, plot(network, base, rows)))


if __name__ == "__main__":
    main()
