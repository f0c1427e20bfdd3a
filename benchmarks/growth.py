"""How time and memory grow with channels, layers, images and their size; exponents are fitted.

    python -m benchmarks.growth [--device cuda] [--only channels size]
    python -m benchmarks.growth --only                  # draws what was measured before
    python -m benchmarks.growth --parts                 # 384 channels with less and less memory

Every axis is stored as it is done, so that several can be measured side by side. Each point is a
chain of 3×3 convolutions with BatchNorm compressed in a process of its own, so that the peak of
memory is its own; on the CPU time is of processors, which others change less.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.common.environment import default_device, results_dir
from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_figure, save_results
from benchmarks.common.tables import print_table
from benchmarks.speed.clock import peak_bytes, spent
from lbyl.runtime import heap
from lbyl.runtime.files import read_json
from lbyl.statistics import collect

BASE = {"channels": 64, "layers": 6, "images": 128, "size": 32}
POINTS = {
    "channels": (48, 96, 192, 384),
    "layers": (6, 12, 24, 48),
    "images": (128, 256, 512, 1024),
    "size": (32, 64, 128, 192),
}
SHARES = (1.0, 0.5, 0.25, 0.0)  # of all statistics that there is room for; none: one at a time


def chain(channels: int, layers: int) -> nn.Module:
    made: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)]
    for _ in range(layers):
        made += [nn.BatchNorm2d(channels), nn.ReLU()]
        made += [nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
    return nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def measure(point: dict[str, int], device: str) -> dict[str, float]:
    """Seconds and bytes of one compression, in this process."""
    import lbyl

    heap.PART = 1 << 60  # none is kept idle for the next layer: what is needed is measured
    if "room" in point:
        free = 2 * point["room"]  # half of what is free may be taken
        collect.free_bytes = lambda device: free  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = chain(point["channels"], point["layers"]).eval().to(device)
    example = torch.zeros(1, 3, point["size"], point["size"], device=device)
    lbyl.compress(chain(8, 1).eval().to(device), example[..., :8, :8], data=8)  # loads everything
    before = peak_bytes(device)
    prepared = lbyl.prepare(model, example, data=point["images"])
    held: dict[str, Any] = {}

    def work() -> None:
        held["statistics"] = prepared.statistics()
        prepared.compress({"*": 0.5}, criterion="echo")

    taken = spent(work, device)
    peak = peak_bytes(device)  # what is read of the disk for what follows does not count
    sizes = [m.covariance.numel() * 8 for m in held["statistics"].moments.values()]
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "seconds": taken.wall if device.startswith("cuda") else taken.processor,
        "bytes": peak - before,
        "model": parameters,
        "statistics": sum(sizes),
        "largest": max(sizes),
    }


def exponent(xs: list[float], ys: list[float]) -> float:
    """The slope of the upper half of the points, in logarithms."""
    xs, ys = xs[len(xs) // 2 - 1 :], ys[len(ys) // 2 - 1 :]
    lx, ly = [math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    spread = sum((a - mx) ** 2 for a in lx)
    return sum((a - mx) * (b - my) for a, b in zip(lx, ly)) / spread


def main() -> None:
    parser = argparse.ArgumentParser(description="How time and memory grow.")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--only", nargs="*", default=list(POINTS))
    parser.add_argument("--parts", action="store_true", help="statistics on the disk, in parts")
    parser.add_argument("--point", default=None, help="measure one, as JSON (internal)")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(json.loads(options.point), options.device)))
        return
    kind = "gpu" if options.device.startswith("cuda") else "cpu"
    if options.parts:
        curve = with_less_memory(options.device)
        print("stored in", save_results(f"growth-{kind}-parts", {"base": BASE, "curve": curve}))
        columns = ["of the statistics in memory", "s", "MB above the start", "× model and largest"]
        print_table("Statistics in parts", columns, [_beside_the_largest(p) for p in curve])
        return
    for axis in options.only:
        curve = [
            {"value": float(value), **measured_apart({axis: value}, options.device)}
            for value in POINTS[axis]
        ]
        print("stored in", save_results(f"growth-{kind}-{axis}", {"base": BASE, "curve": curve}))
    stored = {axis: results_dir() / f"growth-{kind}-{axis}.json" for axis in POINTS}
    curves = {axis: read_json(path)["curve"] for axis, path in stored.items() if path.is_file()}
    print_table("Growth", ["", "value", "s", "MB above the start"], _rows(curves))
    figure = _figure(curves)
    if figure is not None:
        save_figure(results_dir() / f"growth-{kind}.png", figure)


def measured_apart(changed: dict[str, int], device: str) -> dict[str, float]:
    """One point, in a process of its own."""
    point = json.dumps({**BASE, **changed})
    command = [sys.executable, "-m", "benchmarks.growth", "--device", device, "--point", point]
    done = subprocess.run(command, capture_output=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    print(changed, found, flush=True)
    return found


def with_less_memory(device: str) -> list[dict[str, float]]:
    """The widest chain with room for less and less of its statistics, first for all of them."""
    changed = {"channels": POINTS["channels"][-1]}
    points = [{"share": SHARES[0], **measured_apart(changed, device)}]
    for share in SHARES[1:]:
        room = int(share * points[0]["statistics"])
        points.append({"share": share, **measured_apart({**changed, "room": room}, device)})
    return points


def _beside_the_largest(point: dict[str, float]) -> list[Any]:
    together = point["model"] + point["largest"]
    return [point["share"], point["seconds"], point["bytes"] / 1e6, point["bytes"] / together]


def _rows(curves: dict[str, list[dict[str, float]]]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for axis, curve in curves.items():
        rows += [[axis, p["value"], p["seconds"], p["bytes"] / 1e6] for p in curve]
        values = [p["value"] for p in curve]
        slopes = [exponent(values, [p[k] for p in curve]) for k in ("seconds", "bytes")]
        rows.append([f"{axis}, exponent", None, *slopes])
    return rows


def _figure(curves: dict[str, list[dict[str, float]]]) -> Any:
    plt = pyplot()
    if plt is None:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for ax, key, title in zip(axes, ("seconds", "bytes"), ("seconds", "bytes above the start")):
        for axis, points in curves.items():
            values, heights = [p["value"] for p in points], [max(p[key], 1e-9) for p in points]
            label = f"{axis}: {exponent(values, heights):.1f}"
            ax.loglog(values, heights, marker="o", label=label)
        ax.set_title(title)
        ax.legend()
    return figure


if __name__ == "__main__":
    main()
