"""What is chosen without data, beside what it was chosen from: widths, criteria, spared units.

    python -m benchmarks.choosing [--networks vgg16_cifar10,...] [--seeds 0,1,2] [--limit 4000]

Every layer that can be pruned is. A budget of MACs is shared out by layer ("chosen") or met by the
single ratio that leaves as many ("uniform"); a plain ratio comes as the library makes it, beside
both criteria taken literally. Rows that are stored already are not measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import lbyl
from benchmarks.budget import uniform_ratio
from benchmarks.common.environment import default_device
from benchmarks.common.networks import Case, LabelledImages, load_images, load_network
from benchmarks.common.results import save_results, stored_rows
from benchmarks.common.tables import print_table

NETWORKS = (
    "vgg16_cifar10",
    "resnet20_cifar10",
    "resnet56_cifar10",
    "resnet50_cifar100",
    "mobilenet_v2_imagenet",
    "efficientnet_lite0_imagenet",
)
BUDGETS = (0.8, 0.6, 0.4)  # MACs left
RATIOS = (0.1, 0.3, 0.5)
CRITERION = "echo"  # of budgets

Row = dict[str, Any]


def key(row: Row) -> tuple[Any, ...]:
    """What a row was measured at."""
    return row["net"], row["seed"], row.get("macs"), row.get("ratio")


def wanted(name: str, seed: int, budgets: Sequence[float]) -> list[Row]:
    """The rows of one network and seed, yet without figures."""
    at = {"net": name, "seed": seed}
    return [{**at, "macs": f} for f in budgets] + [{**at, "ratio": r} for r in RATIOS]


def measure(case: Case, row: Row) -> Row:
    """A row with its figures."""
    prepared, start = case.prepared(), time.perf_counter()
    if "macs" in row:
        chosen = prepared.compress(lbyl.Budget(macs=row["macs"]), criterion=CRITERION)
        seconds = time.perf_counter() - start
        ratio = uniform_ratio(prepared.graph, row["macs"])
        uniform = prepared.compress({"*": ratio}, criterion=CRITERION)
        assert chosen.allocation is not None
        figures: Row = {
            "chosen": case.accuracy(chosen.model),
            "uniform": case.accuracy(uniform.model),
            "name": chosen.allocation.name,
        }
    else:
        plain = prepared.compress(row["ratio"])
        seconds = time.perf_counter() - start
        figures = {"default": case.accuracy(plain.model), "by": plain.chosen_by}
        if plain.allocation is not None:
            figures["spared"] = list(plain.allocation.spared)
        for criterion in ("l2", "echo"):
            literal = prepared.compress({"*": row["ratio"]}, criterion=criterion)
            figures[criterion] = case.accuracy(literal.model)
    return {**row, **figures, "t": round(seconds, 1)}


def missing(options: argparse.Namespace, known: set[tuple[Any, ...]]) -> Iterator[Row]:
    """The rows that are asked for and not known yet."""
    budgets = [float(fraction) for fraction in options.budgets.split(",")]
    for name in options.networks.split(","):
        for seed in map(int, options.seeds.split(",")):
            rows = wanted(name, seed, budgets)
            rows = [row for row in rows if options.only is None or options.only in row]
            yield from (row for row in rows if key(row) not in known)


def worst(rows: list[Row]) -> list[list[Any]]:
    """Of every network and budget: chosen less uniform over the seeds, the least and the mean."""
    table = []
    for name in dict.fromkeys(row["net"] for row in rows):
        fractions = {row["macs"] for row in rows if "macs" in row}
        for fraction in sorted(fractions, reverse=True):
            own = [r for r in rows if r["net"] == name and r.get("macs") == fraction]
            if own:
                gains = [r["chosen"] - r["uniform"] for r in own]
                mean = [sum(r[k] for r in own) / len(own) for k in ("uniform", "chosen")]
                table.append([name, fraction, len(own), *mean, min(gains)])
    return table


def rows_parser(text: str, limit: int | None = 4000) -> argparse.ArgumentParser:
    """The options of a benchmark whose rows are of networks and seeds; `text` is its docstring.

    `limit` is how many images they are measured on; None: they need none.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default=default_device())
    if limit is not None:
        parser.add_argument("--limit", type=int, default=limit)
    return parser


def main() -> None:
    parser = rows_parser(__doc__)
    parser.add_argument("--only", choices=("macs", "ratio"), help="rows of budgets, or of ratios")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="MACs left")
    options = parser.parse_args()
    rows = stored_rows("choosing")
    case: Case | None = None
    known = {key(row) for row in rows}
    for row in list(missing(options, known)):
        if case is None or (case.name, case.seed) != (row["net"], row["seed"]):
            network = load_network(row["net"], options.device)
            images = LabelledImages.of(load_images(row["net"]), network, options.limit)
            case = Case(row["net"], network, images, seed=row["seed"])
        rows.append(measure(case, row))
        print(rows[-1], flush=True)
        save_results("choosing", {"rows": rows})
    columns = ["network", "MACs left", "seeds", "one ratio", "chosen", "least gain"]
    print_table("Budgets", columns, worst(rows))


if __name__ == "__main__":
    main()
