"""Ratios chosen from predicted errors against one ratio for all layers, at equal MACs.

    python benchmarks/budget.py [--networks vgg16_cifar10,...] [--limit 1000]

No data is used to choose anything; test images only measure the outcome.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import lbyl
from harness import print_table, save_results
from lbyl.budget import Sizes
from lbyl.ratios import counts
from restoration import NETWORKS, Bench, prepare

SHARES = {"mobilenet_v2_imagenet": (0.9, 0.8, 0.7)}


def uniform_ratio(bench: Bench, share: float) -> float:
    """The single ratio that leaves at most this share of MACs."""
    sizes = Sizes(bench.graph)
    whole = bench.graph.macs()
    return next(
        r / 200 for r in range(200) if sizes.macs(counts(bench.graph, r / 200)) <= share * whole
    )


def measure(bench: Bench) -> list[dict[str, Any]]:
    found = bench.source("procedural")
    rows = []
    for share in SHARES.get(bench.name, (0.6, 0.4, 0.3)):
        for criterion in ("l2", "echo"):
            given = {"criterion": criterion, "graph": bench.graph, "statistics": found}
            ratio = uniform_ratio(bench, share)
            same = lbyl.compress(bench.model, bench.example, ratio, **given)
            chosen = lbyl.compress(bench.model, bench.example, macs=share, **given)
            rows.append(
                {
                    "macs": share,
                    "criterion": criterion,
                    "uniform": bench.accuracy(same.model),
                    "uniform macs": same.after.macs / same.before.macs,
                    "chosen": bench.accuracy(chosen.model),
                    "chosen macs": chosen.after.macs / chosen.before.macs,
                }
            )
            print(bench.name, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    results = {}
    for name in options.networks.split(","):
        bench = prepare(name, options.device, options.limit)
        rows = measure(bench)
        results[name] = {"base": bench.accuracy(bench.model), "rows": rows}
        table = [[f"{r['macs']:.0%} {r['criterion']}", r["uniform"], r["chosen"]] for r in rows]
        print_table(name, ["MACs left, criterion", "one ratio", "chosen by layer"], table)
    print("kept in", save_results("budget", {"networks": results}))


if __name__ == "__main__":
    main()
