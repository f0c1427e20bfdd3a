"""How fast it is.

    python -m benchmarks.speed stages [--network resnet50] [--device cuda] [--refine 100]
    python -m benchmarks.speed choices [--network resnet101] [--device cuda]
    python -m benchmarks.speed loop [--device cuda] [--only resnet101]
    python -m benchmarks.speed first [--only resnet56_cifar10]
    python -m benchmarks.speed sweep [--network resnet18] [--size 32]

`stages` sets every stage beside a plain forward pass of the same images, in wall and in processor
time; `choices` sets criteria, budgets and methods beside the plain criterion; `loop` sets the
closed form of `lbyl` beside the published program's loop; `first` takes networks of 32 px from a
model to the first answer of a process, by the clock; `sweep` sets two workers beside one.
Weights are random: time does not depend on them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.common.environment import default_device
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from benchmarks.speed import first, loop
from benchmarks.speed.choices import CHOICES, choices
from benchmarks.speed.clock import Rates
from benchmarks.speed.stages import stages, table
from benchmarks.speed.sweeping import workers


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast it is.")
    parser.add_argument("what", choices=["stages", "choices", "loop", "first", "sweep"])
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--network", default="resnet50", help="a torchvision model")
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--refine", type=int, default=0, help="steps of refinement")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=[], help="of the choices, or of the networks")
    parser.add_argument("--no-loop", action="store_true", help="time ours alone")
    parser.add_argument("--point", help="measure one first answer, as JSON (internal)")
    parser.add_argument("--profile", type=Path, help="folder for a profile of every choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    kind = "gpu" if options.device.startswith("cuda") else "cpu"
    if options.what == "loop":
        _loop(options, kind)
        return
    if options.what == "first":
        _first(options)
        return
    if options.what == "sweep":
        rows = workers(options.network, options.size)
        print_table("A sweep", ["workers", "rows", "s", "× one worker"], rows)
        print("stored in", save_results("speed-sweep-cpu", {"rows": rows}))
        return
    import torchvision

    model = torchvision.models.get_model(options.network, weights=None).eval().to(options.device)
    example = torch.zeros(1, 3, options.size, options.size, device=options.device)
    where = f"{options.network}, {options.size} px, {options.device}"
    name = f"speed-{options.network}-{kind}"
    if options.what == "choices":
        rows = choices(model, example, options.only or list(CHOICES), options.profile, options.runs)
        columns = ["", "s", "× first", "first run, s", "stages"]
        print_table(f"From a model to a smaller one: {where}", columns, rows)
        print("stored in", save_results(f"{name}-choices", {"rows": rows}))
        return
    taken = stages(model, example, options.ratio, options.refine, options.runs)
    columns = ["stage", "ms", "× a pass, wall", "× a pass, processors"]
    print_table(f"echo on {where}", columns, table(taken))
    name += "-refined" if options.refine else ""
    stored = {"seconds": {stage: asdict(one) for stage, one in taken.items()}}
    print("stored in", save_results(name, stored))


def _first(options: argparse.Namespace) -> None:
    if options.point:
        print(json.dumps(first.measure(*json.loads(options.point))))
        return
    rows = first.first_answers(options.only, options.threads)
    print_table("From a model to the first answer, 32 px, cpu", first.COLUMNS, rows)
    stored = {"columns": first.COLUMNS, "rows": rows}
    print("stored in", save_results("speed-first-cpu", stored))


def _loop(options: argparse.Namespace, kind: str) -> None:
    ratio = options.ratio
    rows = loop.compare(options.device, options.only, ratio, not options.no_loop)
    print_table(f"The closed form against the loop, {options.device}", loop.COLUMNS, rows)
    rates = asdict(Rates.measured(options.device))
    stored = {"rates": rates, "ratio": ratio, "columns": loop.COLUMNS, "rows": rows}
    print("stored in", save_results(f"speed-loop-{kind}", stored))


if __name__ == "__main__":
    main()
