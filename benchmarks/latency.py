"""Does removing filters save time, and does it pay to keep a multiple of eight?

    python -m benchmarks.latency [--onnx] [--device cuda]

Random weights are good enough: time depends on shapes alone. Every size of a network is timed in
one run, taking turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision import models

import lbyl
import lbyl.app.export
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from lbyl.latency import Timing, compare

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": models.resnet18,
    "mobilenet_v2": models.mobilenet_v2,
}


def slimmed(
    model: nn.Module, example: torch.Tensor, ratios: list[float], multiple_of: int
) -> dict[tuple[float, int], tuple[nn.Module, int]]:
    """The network at every ratio, as it comes and rounded: (ratio, multiple) → model, MACs."""
    prepared = lbyl.prepare(model, example)
    variants = {(0.0, 1): (model, prepared.graph.macs())}
    for ratio in ratios:
        for multiple in (1, multiple_of):
            result = prepared.compress(ratio, method="none", multiple_of=multiple)
            variants[ratio, multiple] = (result.model, result.after.macs)
    return variants


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one network."""
    torch.manual_seed(0)
    example = torch.randn(1, 3, options.size, options.size)
    variants = slimmed(NETWORKS[name]().eval(), example, options.ratios, options.multiple_of)
    labels = {f"{ratio}/{step}": key for key in variants for ratio, step in [key]}
    batch = example.expand(options.batch, -1, -1, -1).contiguous()
    timings = compare(
        {label: variants[key][0] for label, key in labels.items()},
        batch,
        options.device,
        options.repeats,
        options.threads,
        "onnx" if options.onnx else "pytorch",
    )
    base = timings["0.0/1"]
    full = variants[0.0, 1][1]
    return [
        row(name, *labels[label], variants[labels[label]][1] / full, timing, base)
        for label, timing in timings.items()
    ]


def row(
    name: str, ratio: float, step: int, macs: float, timing: Timing, base: Timing
) -> dict[str, Any]:
    """One line of the table, as plain data."""
    return {
        "network": name,
        "ratio": ratio,
        "multiple_of": step,
        "macs": macs,
        "milliseconds": 1e3 * timing.median,
        "spread": 1e3 * timing.iqr,
        "fastest": 1e3 * min(timing.runs),
        "speedup": base.median / timing.median,
        "fastest_speedup": min(base.runs) / min(timing.runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.3, 0.5])
    parser.add_argument("--multiple-of", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--onnx", action="store_true", help="time ONNX Runtime instead of PyTorch")
    options = parser.parse_args()
    rows = [row for name in options.networks for row in measure(name, options)]
    engine = "ONNX Runtime" if options.onnx else "PyTorch"
    columns = ["network", "ratio", "multiple of", "MACs", "ms", "± ms", "fastest ms"]
    columns += ["times as fast", "by the fastest"]
    print_table(
        f"{engine} on {options.device}, batch {options.batch}, {options.size} px",
        columns,
        [[*list(r.values())[:3], f"{100 * r['macs']:.0f} %", *list(r.values())[4:]] for r in rows],
    )
    suffix = "-onnx" if options.onnx else ""
    name = f"latency-{options.device.partition(':')[0]}{suffix}"
    print(save_results(name, {"settings": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
