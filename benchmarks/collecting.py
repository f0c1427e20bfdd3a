"""From how many windows on taps are worth telling apart, and how small batches may be.

    python -m benchmarks.collecting [--networks vgg16_cifar10,...] [--seeds 0,1,2] [--limit 4000]

Every network is compressed with statistics that are collected in other ways, and compared with the
original on images of a seed that nothing else has. What a way costs is the logarithm of its
divergence over that of the way in use: 0.01 is one percent more divergence. Accuracy is told beside
it and chooses nothing. Every network is left out in turn: what costs least on the others is told
for it. Rows that are stored already are not measured again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import lbyl
from benchmarks.choosing import rows_parser
from benchmarks.common.networks import LabelledImages, load_images, load_network
from benchmarks.common.results import save_results, stored_rows
from benchmarks.common.tables import print_table
from lbyl.inputs.batches import FreshInputs, InputBatches
from lbyl.scoring.compare import Divergence
from lbyl.statistics import collect

NETWORKS = "vgg16_cifar10,resnet56_cifar10,resnet20_cifar10,resnet50_cifar100"
RATIOS = (0.3, 0.5)
NEVER = 1e9
WINDOWS = (0.0, 1.0, 2.0, 4.0, NEVER)  # for every feature; 0: taps are always told apart
IMAGES = (None, 128, 32)  # of a collection; None: as many as suit the network
BATCHES = (256, 128, 64, 32, 16)  # images that run at once, at most
JUDGING_SEED = 977
IN_USE = {"windows": 1.0, "images": None, "batch": None}

Row = dict[str, Any]


def ways() -> Iterator[Row]:
    """All ways of collecting that are compared."""
    for windows, images in itertools.product(WINDOWS, IMAGES):
        yield {**IN_USE, "windows": windows, "images": images}
    yield from ({**IN_USE, "batch": batch} for batch in BATCHES)


def key(row: Row) -> tuple[Any, ...]:
    """What a row was measured at."""
    return tuple(row[name] for name in ("net", "seed", "windows", "images", "batch", "ratio"))


def prepare(model: Any, example: Any, seed: int, way: Row) -> lbyl.Prepared:
    """A network whose statistics are collected in another way."""
    drawn = FreshInputs.collection

    def smaller(fresh: FreshInputs, count: int | None = None) -> InputBatches:
        inputs = drawn(fresh, count)
        return inputs if way["batch"] is None else inputs.at_most(way["batch"])

    prepared = lbyl.prepare(model, example, data=way["images"], seed=seed)
    with (
        patch.object(FreshInputs, "collection", smaller),
        patch.object(collect, "FEWEST_PER_FEATURE", way["windows"]),
    ):
        prepared.statistics()
    return prepared


def measure(name: str, seeds: Sequence[int], known: set[Any], options: Any) -> Iterator[list[Row]]:
    """Rows of one network that are not known yet, way by way."""
    network = load_network(name, options.device)
    test = LabelledImages.of(load_images(name), network, options.limit)
    apart: Divergence = lbyl.prepare(network.model, network.example, seed=JUDGING_SEED).judges.whole
    for seed, way in itertools.product(seeds, ways()):
        rows = [{"net": name, "seed": seed, **way, "ratio": ratio} for ratio in RATIOS]
        rows = [row for row in rows if key(row) not in known]
        prepared = prepare(network.model, network.example, seed, way) if rows else None
        for row in rows:
            assert prepared is not None
            slim = prepared.compress({"*": row["ratio"]}, criterion="echo").model
            row |= {"divergence": apart(slim), "accuracy": test.accuracy(slim)}
            print(row, flush=True)
        yield rows


def cost(rows: Sequence[Row], way: Row) -> tuple[float, float]:
    """Mean of a way's cost in percent over all settings, and by how much accuracy differs."""
    found = {key(row): row for row in rows}
    costs, points = [], []
    for row in rows:
        usual = found.get(key({**row, **IN_USE, "images": way["images"]}))
        if usual is not None and all(row[name] == way[name] for name in way):
            costs.append(math.log(row["divergence"] / usual["divergence"]))
            points.append(row["accuracy"] - usual["accuracy"])
    mean = 1 / max(1, len(costs))
    return 100 * sum(costs) * mean, sum(points) * mean


def left_out(rows: Sequence[Row]) -> list[list[Any]]:
    """Network, the number of windows that costs least on the others, and its cost here."""
    table = []
    for name in dict.fromkeys(row["net"] for row in rows):
        others = [row for row in rows if row["net"] != name]
        own = [row for row in rows if row["net"] == name]

        def all_images(some: Sequence[Row], windows: float) -> float:
            return sum(cost(some, {**IN_USE, "windows": windows, "images": n})[0] for n in IMAGES)

        best = min(WINDOWS, key=lambda windows: (all_images(others, windows), windows))
        table.append([name, best, all_images(own, best) / len(IMAGES)])
    return table


def main() -> None:
    parser = rows_parser(__doc__)
    parser.set_defaults(networks=NETWORKS)
    options = parser.parse_args()
    rows = stored_rows("collecting")
    known = {key(row) for row in rows}
    for name in options.networks.split(","):
        for new in measure(name, [int(seed) for seed in options.seeds.split(",")], known, options):
            rows += new
            save_results("collecting", {"rows": rows})
    table = []
    for name, way in itertools.product(dict.fromkeys(row["net"] for row in rows), ways()):
        own = [row for row in rows if row["net"] == name]
        table.append([name, *way.values(), *cost(own, way)])
    columns = ["network", "windows", "images", "batch", "divergence, %", "accuracy, points"]
    print_table("Beside the way in use", columns, table)
    print_table("One network left out", ["network", "windows", "divergence, %"], left_out(rows))


if __name__ == "__main__":
    main()
