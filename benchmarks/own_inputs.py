"""How many inputs of one's own are worth having: none, a few, or many.

    python -m benchmarks.own_inputs [--networks resnet20_cifar10,...] [--counts 0,16,64,256]
    python -m benchmarks.own_inputs DIRECTORY     # networks described as for benchmarks.unseen

Own inputs are test images without their labels, and are not among those that measure: the last
images are own, the others measure. Closed form, criterion `echo`, all layers open to pruning. A row
is a number of own images (0: none, data-free) and says, beside the accuracy, what was forecast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lbyl
from benchmarks.budget import uniform_ratio
from benchmarks.common.environment import default_device
from benchmarks.common.networks import Case, LabelledImages, is_large, load_case
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from benchmarks.unseen import described, load
from lbyl.planning.task import Amount

NETWORKS = ("resnet20_cifar10", "resnet56_cifar10", "mobilenet_v2_imagenet")
COUNTS = (0, 16, 64, 256)
BUDGETS = (0.8, 0.6)  # MACs left
LIMIT = 4000  # images that measure, at most


@dataclass(frozen=True)
class Divided:
    """A network's images: unlabelled ones that are given, and others that measure."""

    case: Case
    own: Tensor

    @classmethod
    def of(cls, case: Case, most: int) -> Divided:
        images = torch.cat([x for x, _ in case.test.batches])
        labels = torch.cat([y for _, y in case.test.batches])
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(case.seed))
        images, labels = (x[order.to(x.device)] for x in (images, labels))
        if len(images) < 2 * most:
            raise SystemExit(f"{case.name} has {len(images)} images: too few for {most} own ones")
        size, measuring = 100 if is_large(case.network) else 500, min(len(images) - most, LIMIT)
        pairs = zip(images[:measuring].split(size), labels[:measuring].split(size))
        test = LabelledImages.of_batches(pairs, case.network)
        return cls(Case(case.name, case.network, test, seed=case.seed), images[-most:])


def settings(graph: lbyl.Graph) -> Iterator[tuple[str, Amount]]:
    yield "30 %", {"*": 0.3}
    for macs in BUDGETS:
        yield f"MACs {macs:g} uniform", {"*": uniform_ratio(graph, macs)}
        yield f"MACs {macs:g} chosen", lbyl.Budget(macs=macs)


def measure(divided: Divided, count: int) -> Iterator[dict[str, Any]]:
    case = divided.case
    prepared = lbyl.prepare(
        case.network.model,
        case.network.example,
        data=divided.own[:count] if count else None,
        seed=case.seed,
    )
    for name, amount in settings(prepared.graph):
        result = prepared.compress(amount, criterion="echo")
        told = result.forecast
        yield {
            "setting": name,
            "own": count,
            "accuracy": case.accuracy(result.model),
            "forecast": None if told is None else [told.kept, told.low, told.high],
            "forecast on": None if told is None else told.source,
            "data": result.data,
        }


def show(name: str, base: float, rows: list[dict[str, Any]], counts: list[int]) -> None:
    table = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        found = {row["own"]: row for row in rows if row["setting"] == setting}
        table.append([setting, *(found[count]["accuracy"] for count in counts)])
    head = ["setting", *(f"{count} own" if count else "no data" for count in counts)]
    print_table(f"{name}, {base:.1f} % before", head, table)


def covered(rows: list[dict[str, Any]], base: float) -> float:
    """The fraction of rows whose accuracy lies within what was forecast."""
    told = [(row["accuracy"] / base, row["forecast"]) for row in rows if row["forecast"]]
    return sum(low <= kept <= high for kept, (_, low, high) in told) / max(1, len(told))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.directory is not None:
        for path in described(options.directory).values():
            yield load(path, options.device, seed=options.seed)
        return
    for name in options.networks.split(","):
        case = load_case(name, options.device)
        yield Case(case.name, case.network, case.test, seed=options.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", help="see benchmarks.unseen")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--seed", type=int, default=0, help="of images, drawn and divided")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--results", type=Path, help="where own-inputs.json is stored")
    options = parser.parse_args()
    counts = [int(count) for count in options.counts.split(",")]
    networks: dict[str, Any] = {}
    for case in cases(options):
        divided = Divided.of(case, max(counts))
        base = divided.case.accuracy(case.network.model)
        rows: list[dict[str, Any]] = []
        for count in counts:
            for row in measure(divided, count):
                rows.append(row)
                print(case.name, row, flush=True)
        networks[case.name] = {"base": base, "images": len(divided.case.test), "rows": rows}
        show(case.name, base, rows, counts)
        print(f"within the forecast: {covered(rows, base):.0%}")
        save_results("own-inputs", {"networks": networks}, folder=options.results)


if __name__ == "__main__":
    main()
