"""Ratios chosen from predicted errors against one ratio for all layers, at equal MACs.

    python -m benchmarks.budget [--networks vgg16_cifar10,...] [--limit 1000]

No data is used to choose anything; test images only measure the outcome.
"""

from __future__ import annotations

import argparse
from typing import Any

import lbyl
from benchmarks.common.environment import default_device
from benchmarks.common.networks import NETWORKS, Case, load_case
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from lbyl.planning.budget import Sizes
from lbyl.planning.ratio import counts

FRACTIONS = {"mobilenet_v2_imagenet": (0.9, 0.8, 0.7)}  # of MACs left


def uniform_ratio(graph: lbyl.Graph, fraction: float) -> float:
    """The smallest single ratio, in steps of 0.5 %, that leaves at most this fraction of MACs."""
    sizes, whole = Sizes(graph), graph.macs()
    for step in range(200):
        if sizes.macs(counts(graph, step / 200)) <= fraction * whole:
            return step / 200
    raise lbyl.LbylError(f"no ratio for all layers leaves as little as {fraction:.0%} of the MACs")


def measure(case: Case) -> list[dict[str, Any]]:
    prepared = case.prepared()
    rows = []
    for fraction in FRACTIONS.get(case.name, (0.6, 0.4, 0.3)):
        for criterion in ("l2", "echo"):
            ratio = uniform_ratio(prepared.graph, fraction)
            uniform = prepared.compress({"*": ratio}, criterion=criterion)
            chosen = prepared.compress(lbyl.Budget(macs=fraction), criterion=criterion)
            rows.append(
                {
                    "macs": fraction,
                    "criterion": criterion,
                    "uniform": case.accuracy(uniform.model),
                    "uniform macs": uniform.after.macs / uniform.before.macs,
                    "chosen": case.accuracy(chosen.model),
                    "chosen macs": chosen.after.macs / chosen.before.macs,
                }
            )
            print(case.name, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    networks = {}
    for name in options.networks.split(","):
        case = load_case(name, options.device, options.limit)
        rows = measure(case)
        networks[name] = {"base": case.accuracy(case.network.model), "rows": rows}
        table = [[f"{r['macs']:.0%} {r['criterion']}", r["uniform"], r["chosen"]] for r in rows]
        print_table(name, ["MACs left, criterion", "one ratio", "chosen by layer"], table)
    print("stored in", save_results("budget", {"networks": networks}))


if __name__ == "__main__":
    main()
