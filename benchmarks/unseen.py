"""Networks that no setting was chosen on: one table for a directory of them, settings fixed here.

    python -m benchmarks.unseen DIRECTORY                # closed form, without data
    python -m benchmarks.unseen DIRECTORY --refine 100   # and after refinement
    python -m benchmarks.unseen DIRECTORY --own          # and closed form on real images

The directory holds a file NAME.json for each network; paths in it are seen from the directory:

    {"model": "torchvision:mobilenet_v2",        (or "lbyl:vgg16_cifar10", "file.py:factory")
     "weights": "file.safetensors",
     "test": "images.npz",
     "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "input_size": 224}

`mean`, `std` and `input_size` may be left out where the source of the model knows them. Every
network gets the same settings, and all of its layers are open to pruning. "Chosen" is a budget of
MACs shared out by layer, "uniform" the single ratio that leaves as many. Test images measure; with
`--own` the first of them, unlabelled, are also what statistics are collected from. A setting that
fails is a row that says why. Rows are stored as they are finished.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lbyl
from benchmarks.budget import uniform_ratio
from benchmarks.common.environment import default_device
from benchmarks.common.jobs import matching
from benchmarks.common.networks import Case, LabelledImages
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from lbyl.app import data
from lbyl.app.sources import resolve
from lbyl.planning.task import Amount
from lbyl.runtime.files import read_json

RATIOS = (0.3, 0.5)
CRITERIA = ("l2", "echo")
BUDGETS = (0.8, 0.6, 0.4)  # MACs left
BUDGET_CRITERION = "echo"
KEYS = {"model", "weights", "test", "mean", "std", "input_size"}
COLUMNS = ("closed form", "refined", "real images, closed form")


@dataclass(frozen=True)
class Setting:
    """One row of the table: what is pruned of any network, and by which criterion."""

    name: str
    criterion: str | None  # None: as the library chooses
    amount: Callable[[lbyl.Graph], Amount]


def settings() -> Iterator[Setting]:
    """The rows of every network, in the order of the table."""
    for ratio in RATIOS:
        yield Setting(f"{ratio:.0%} as it comes", None, _ratio(ratio))
        for criterion in CRITERIA:
            yield Setting(f"{ratio:.0%} {criterion}", criterion, _exactly(ratio))
    for macs in BUDGETS:
        yield Setting(f"MACs {macs:g} chosen", BUDGET_CRITERION, _budget(macs))
        yield Setting(f"MACs {macs:g} uniform", BUDGET_CRITERION, _uniform(macs))


def _ratio(ratio: float) -> Callable[[lbyl.Graph], Amount]:
    return lambda graph: ratio


def _exactly(ratio: float) -> Callable[[lbyl.Graph], Amount]:
    """No unit is spared."""
    return lambda graph: {"*": ratio}


def _budget(macs: float) -> Callable[[lbyl.Graph], Amount]:
    return lambda graph: lbyl.Budget(macs=macs)


def _uniform(macs: float) -> Callable[[lbyl.Graph], Amount]:
    return lambda graph: {"*": uniform_ratio(graph, macs)}


def described(folder: Path, only: str | None = None) -> dict[str, Path]:
    """Network → its JSON file, by name."""
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not files:
        raise SystemExit(f"{folder} holds no NAME.json that describes a network")
    return {name: files[name] for name in matching(list(files), only)}


def load(path: Path, device: str, limit: int | None = None, seed: int = 0) -> Case:
    """The network that a JSON file describes, with its test images."""
    entry = read_json(path)
    if not isinstance(entry, dict) or not {"model", "test"} <= entry.keys() <= KEYS:
        known = ", ".join(sorted(KEYS))
        raise SystemExit(f"{path}: 'model' and 'test' are needed, and the keys are {known}")
    size = entry.get("input_size")
    network = resolve(
        _beside(path, entry["model"]),
        _beside(path, entry["weights"]) if "weights" in entry else None,
        None if size is None else (size,),
    )
    network = network.scaled(entry.get("mean"), entry.get("std")).to(device)
    images = data.load(_beside(path, entry["test"]), size=network.image_size)
    return Case(path.stem, network, LabelledImages.of(images, network, limit), seed=seed)


def _beside(path: Path, name: str) -> str:
    """A file beside the description, or the name as it is: a source, or a word that one knows."""
    file = name.partition(".py:")[0] + ".py" if ".py:" in name else name
    return str(path.parent / name) if (path.parent / file).exists() else name


def measure(case: Case, setting: Setting, refine: int, own: bool) -> dict[str, Any]:
    """One row: accuracies in %, sizes and seconds; what failed stands in `errors`."""
    row: dict[str, Any] = {"setting": setting.name, "errors": {}}
    start = time.perf_counter()

    def attempt(column: str, make: Callable[[], lbyl.Result]) -> lbyl.Result | None:
        try:
            result = make()
            row[column] = case.accuracy(result.model)
        except Exception as error:  # the table is to say which networks fail, and where
            row[column] = None
            row["errors"][column] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return None
        return result

    def closed_form(source: str) -> lbyl.Result:
        prepared = case.prepared(source)
        return prepared.compress(setting.amount(prepared.graph), criterion=setting.criterion)

    closed = attempt("closed form", lambda: closed_form("procedural"))
    if closed is not None:
        row["macs"] = closed.after.macs / closed.before.macs
        row["parameters"] = closed.after.parameters / closed.before.parameters
        if refine:
            attempt("refined", lambda: case.prepared().refine(closed, refine))
    if own:
        attempt("real images, closed form", lambda: closed_form("real"))
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def show(networks: dict[str, Any]) -> None:
    """The table, and a line for everything that failed."""
    rows, failures = [], []
    for name, figures in networks.items():
        for index, row in enumerate(figures["rows"]):
            first = [name, figures["base"]] if index == 0 else ["", ""]
            cells = ["failed" if c in row["errors"] else row.get(c) for c in COLUMNS]
            rows.append(
                [*first, row["setting"], 100 * row["macs"] if "macs" in row else None, *cells]
            )
            failures += [f"{name}, {row['setting']}, {c}: {e}" for c, e in row["errors"].items()]
    print_table("accuracy in %", ["network", "base", "setting", "MACs left, %", *COLUMNS], rows)
    print("\n".join(failures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="holds NAME.json, weights and images")
    parser.add_argument("--only", help="networks by pattern, separated by commas")
    parser.add_argument("--refine", type=int, default=0, help="steps of refinement")
    parser.add_argument("--own", action="store_true", help="also collect from real images")
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument("--seed", type=int, default=0, help="of procedural images")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--results", type=Path, help="where unseen.json is stored")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    networks: dict[str, Any] = {}
    chosen = {key: getattr(options, key) for key in ("refine", "own", "limit", "seed")}
    stored = Path()
    for name, path in described(options.directory, options.only).items():
        case = load(path, options.device, options.limit, options.seed)
        base = case.accuracy(case.network.model)
        networks[name] = {"base": base, "images": len(case.test), "rows": []}
        for setting in settings():
            row = measure(case, setting, options.refine, options.own)
            networks[name]["rows"].append(row)
            print(name, row, flush=True)
            content = {"options": chosen, "networks": networks}
            stored = save_results("unseen", content, folder=options.results)
    show(networks)
    print("stored in", stored)


if __name__ == "__main__":
    main()
