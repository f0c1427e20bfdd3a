"""How many allocations of a budget need to be tried: what is lost by trying fewer, without data.

    python -m benchmarks.candidates [--networks vgg16_cifar10,...] [--seeds 0,1,2]

Blends of the uniform allocation with both priced ones are all tried in full, at several budgets.
What a choice among fewer loses is the logarithm of its least divergence over the least of all:
0.01 is one percent more divergence. The uniform one is always among them. Every network is left
out in turn: the set that loses least on the others is measured on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import lbyl
from benchmarks.choosing import rows_parser
from benchmarks.common.networks import load_network
from benchmarks.common.results import save_results, stored_rows
from benchmarks.common.tables import print_table
from lbyl.planning import candidates as allocation

BLENDS = {"predicted": (0.5, 1.0), "measured": (0.25, 0.5, 0.75, 1.0)}
FRACTIONS = (0.8, 0.7, 0.6, 0.5, 0.4)  # of the MACs that are left
MOST = 4  # allocations of the largest sets that are compared, besides the uniform one

Row = dict[str, Any]


def names() -> list[str]:
    return [f"{kind} {weight:g}" for kind, weights in BLENDS.items() for weight in weights]


def loss(row: Row, some: Sequence[str]) -> float:
    """What is lost where only these and the uniform allocation are tried."""
    tried: dict[str, float] = row["tried"]
    least = min(tried[name] for name in ("uniform", *some) if name in tried)
    return math.log(least / min(tried.values()))


def mean_loss(rows: Sequence[Row], some: Sequence[str]) -> float:
    return sum(loss(row, some) for row in rows) / len(rows)


def in_percent(rows: Sequence[Row], some: Sequence[str]) -> tuple[float, float]:
    """The mean and the greatest loss, in percent."""
    return 100 * mean_loss(rows, some), 100 * max(loss(row, some) for row in rows)


def best_of(rows: Sequence[Row], count: int) -> tuple[str, ...]:
    """The set of so many allocations by which least is lost."""
    return min(combinations(names(), count), key=lambda some: mean_loss(rows, some))


def by_count(rows: Sequence[Row]) -> list[list[Any]]:
    """How many are tried, the best set of so many, its mean and its greatest loss."""
    sets = [best_of(rows, count) for count in range(1, MOST + 1)]
    return [[len(some), ", ".join(some), *in_percent(rows, some)] for some in sets]


def left_out(rows: Sequence[Row], count: int) -> list[list[Any]]:
    """Network, the set of so many that is best on the others, its mean and greatest loss here."""
    table = []
    for name in dict.fromkeys(row["net"] for row in rows):
        own = [row for row in rows if row["net"] == name]
        some = best_of([row for row in rows if row["net"] != name], count)
        table.append([name, ", ".join(some), *in_percent(own, some)])
    return table


def measure(name: str, seed: int, device: str) -> list[Row]:
    """Rows of one network and seed: the divergence of every allocation at every budget."""
    network = load_network(name, device)
    prepared = lbyl.prepare(network.model, network.example, seed=seed)
    rows = []
    for fraction in FRACTIONS:
        found = prepared.compress(lbyl.Budget(macs=fraction), criterion="echo").allocation
        assert found is not None
        rows.append({"net": name, "seed": seed, "macs": fraction, "tried": dict(found.tried)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    options = rows_parser(__doc__, limit=None).parse_args()
    allocation.BLENDS = BLENDS
    rows = stored_rows("candidates")
    known = {(row["net"], row["seed"]) for row in rows}
    for name in options.networks.split(","):
        for seed in map(int, options.seeds.split(",")):
            if (name, seed) not in known:
                rows += measure(name, seed, options.device)
                save_results("candidates", {"rows": rows})
    columns = ["tried", "allocations", "mean loss, %", "greatest, %"]
    print_table("Fewer allocations", columns, by_count(rows))
    print_table("One network left out", ["network", *columns[1:]], left_out(rows, 3))


if __name__ == "__main__":
    main()
