"""How good the forecast is of networks that were pruned and then written in int8.

    python -m benchmarks.int8 [--networks digits,resnet20_cifar10] [--limit 1000]

The map was calibrated on pruned networks alone. Here each is also quantised on data-free inputs,
measured on labelled images, and held against its forecast. Rows that are stored already are not
measured again; nothing is fitted.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.networks import Case, load_case
from benchmarks.common.results import save_results, stored_rows
from benchmarks.common.tables import print_table
from lbyl.app.deploy import OnnxNetwork, quantise_onnx
from lbyl.app.export import export_onnx

NETWORKS = "digits,lenet300_100_fashionmnist,resnet20_cifar10"
METHODS, RATIOS = ("none", "lbyl", "echo"), (0.1, 0.2, 0.3, 0.5)

Row = dict[str, Any]


def measure(case: Case, method: str, ratio: float) -> Row:
    """What the slim network and its int8 form keep, measured and as forecast."""
    prepared = case.prepared()
    slim = prepared.compress({"*": ratio}, criterion="l2", method=method).model if ratio else None
    made_from = case.network.model if slim is None else slim
    with tempfile.TemporaryDirectory() as place:
        plain, int8 = Path(place) / "plain.onnx", Path(place) / "int8.onnx"
        export_onnx(made_from, case.network.example, plain)
        quantise_onnx(plain, int8, list(prepared.fresh.collection().batches))
        quantised = OnnxNetwork(int8)
        told = prepared.judges.forecaster(quantised)
        now = case.accuracy(quantised)
    before = case.accuracy(case.network.model)
    return {
        "net": case.name,
        "method": method if ratio else "int8 alone",
        "ratio": ratio,
        "slim": case.accuracy(made_from) / before,
        "int8": now / before,
        "forecast": [told.kept, told.low, told.high],
        "images": len(case.test),
    }


def table(rows: list[Row]) -> list[list[Any]]:
    """Of every network: how far the forecast is off, and how often its bounds hold the truth."""
    made = []
    for name in [*dict.fromkeys(row["net"] for row in rows), None]:
        own = [row for row in rows if name in (row["net"], None)]
        mild = [row for row in own if row["int8"] > 0.85]
        off = [abs(row["forecast"][0] - row["int8"]) for row in mild]
        held = [row["forecast"][1] <= min(1, row["int8"]) <= row["forecast"][2] for row in own]
        lost = max(row["slim"] - row["int8"] for row in own)
        made.append(
            [name or "all", len(own), len(mild), sum(off) / max(1, len(off)),
             sum(held) / len(held), lost]
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--limit", type=int, default=1000)
    options = parser.parse_args()
    rows = stored_rows("int8")
    known = {(row["net"], row["method"], row["ratio"]) for row in rows}
    wanted = [("int8 alone", 0.0)] + [(m, r) for m in METHODS for r in RATIOS]
    for name in options.networks.split(","):
        case = load_case(name, limit=options.limit)
        for method, ratio in wanted:
            if (name, method, ratio) not in known:
                rows.append(measure(case, method, ratio))
                print(rows[-1], flush=True)
                save_results("int8", {"rows": rows})
    columns = ["network", "settings", "mild", "mean error, mild", "covered", "most lost by int8"]
    print_table("Forecast of int8", columns, table(rows))


if __name__ == "__main__":
    main()
