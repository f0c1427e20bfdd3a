"""What the closed form keeps on painted, inverted and real images, network by network.

    python -m benchmarks.images [--networks vgg16_cifar10,...] [--seeds 0,1,2] [--limit 4000]

Every layer that can be pruned is, by criterion echo and one ratio. Painted images are the default,
inverted ones `data="inversion"`; real ones are test images without their labels, for comparison.
Rows that are stored already are not measured again, but for those of a source named by `--again`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from benchmarks.choosing import RATIOS, rows_parser
from benchmarks.common.networks import Case, LabelledImages, load_images, load_network
from benchmarks.common.results import save_results, stored_rows
from benchmarks.common.tables import print_table

SOURCES = ("procedural", "inversion", "real")

Row = dict[str, Any]


def measure(case: Case, sources: Iterable[str]) -> list[Row]:
    """A row for every source, with the accuracy at each ratio."""
    rows = []
    for source in sources:
        start = time.perf_counter()
        prepared = case.prepared(source)
        prepared.statistics()
        row: Row = {"net": case.name, "seed": case.seed, "images": source}
        row["seconds to collect"] = round(time.perf_counter() - start, 1)
        for ratio in RATIOS:
            slim = prepared.compress({"*": ratio}, criterion="echo").model
            row[f"{ratio:.0%}"] = case.accuracy(slim)
        print(row, flush=True)
        rows.append(row)
    return rows


def table(rows: list[Row]) -> list[list[Any]]:
    """The mean of each network and source over seeds; of inverted images also the least gain."""
    ratios = [f"{ratio:.0%}" for ratio in RATIOS]
    painted = {(r["net"], r["seed"]): r for r in rows if r["images"] == SOURCES[0]}
    made = []
    for name in dict.fromkeys(row["net"] for row in rows):
        for source in SOURCES:
            own = [r for r in rows if r["net"] == name and r["images"] == source]
            means = [sum(r[key] for r in own) / len(own) for key in ratios]
            gain = min(r[key] - painted[name, r["seed"]][key] for r in own for key in ratios)
            made.append([name, source, len(own), *means, gain])
    return made


def main() -> None:
    parser = rows_parser(__doc__)
    parser.add_argument("--again", choices=SOURCES, help="a source to measure anew")
    options = parser.parse_args()
    networks, seeds = options.networks.split(","), list(map(int, options.seeds.split(",")))
    asked = [(name, seed, options.again) for name in networks for seed in seeds]
    rows = [r for r in stored_rows("images") if (r["net"], r["seed"], r["images"]) not in asked]
    known = {(row["net"], row["seed"], row["images"]) for row in rows}
    for name in networks:
        network = load_network(name, options.device)
        images = LabelledImages.of(load_images(name), network, options.limit)
        for seed in seeds:
            missing = [source for source in SOURCES if (name, seed, source) not in known]
            rows += measure(Case(name, network, images, seed=seed), missing)
            save_results("images", {"rows": rows})
    columns = ["network", "images", "seeds", *(f"{r:.0%}" for r in RATIOS), "least gain"]
    print_table("Accuracy in %, closed form, criterion echo", columns, table(rows))


if __name__ == "__main__":
    main()
