"""Where the time goes: echo on ResNet-50 at 224 px, stage by stage.

    python -m benchmarks.speed [--device cuda] [--network resnet50] [--refine 100]

Weights are random: time does not depend on them. The first run warms up; the median of the
following ones counts.
"""

from __future__ import annotations

import argparse
import statistics as stat
import time
from typing import Any

import torch

import lbyl
from benchmarks.common.environment import default_device
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table


def once(
    model: torch.nn.Module, example: torch.Tensor, ratio: float, refine: int
) -> dict[str, float]:
    """Seconds by stage of one compression, the device waited for."""

    def wait() -> float:
        if example.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = wait()
    prepared = lbyl.prepare(model, example)
    traced = wait()
    images = prepared.statistics().seconds["images"]
    collected = wait()
    result = prepared.compress({"*": ratio}, criterion="l2", refine=refine)
    finished = wait()
    refining = result.seconds.get("refine", 0.0)
    return {
        "trace": traced - start,
        "images": images,
        "collect": collected - traced - images,
        "plan, solve and cut": finished - collected - refining,
        "refine": refining,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--network", default="resnet50", help="a torchvision model")
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--refine", type=int, default=0, help="steps of refinement")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    import torchvision

    model = torchvision.models.get_model(options.network, weights=None).eval().to(options.device)
    example = torch.zeros(1, 3, 224, 224, device=options.device)
    if options.device != "cpu":
        once(model, example, options.ratio, options.refine)
    runs = [once(model, example, options.ratio, options.refine) for _ in range(options.runs)]
    stages = {stage: stat.median(run[stage] for run in runs) for stage in runs[0]}
    total = sum(stages.values())
    rows: list[list[Any]] = [[s, 1000 * t, 100 * t / total] for s, t in stages.items()]
    rows.append(["all", 1000 * total, 100.0])
    closed = total - stages["trace"] - stages["refine"]
    rows.append(["all but trace and refine", 1000 * closed, None])
    title = f"echo on {options.network}, 224 px, {options.device}"
    print_table(title, ["stage", "ms", "%"], rows)
    kind = "gpu" if options.device.startswith("cuda") else "cpu"
    kind += "-refined" if options.refine else ""
    print("stored in", save_results(f"speed-{options.network}-{kind}", {"seconds": stages}))


if __name__ == "__main__":
    main()
