"""How long the procedural images take: 1,000 at 32 px and 256 at 224 px.

``python benchmarks/images_speed.py [--device cuda] [--threads 2] [--each]``
"""

from __future__ import annotations

import argparse
import time

import torch

from lbyl.statistics.synthetic import KINDS, procedural_images

CASES = ((1000, (3, 32, 32)), (256, (3, 224, 224)))


def milliseconds(
    count: int, shape: tuple[int, ...], device: str, kinds: tuple[str, ...], runs: int = 3
) -> float:
    """Best of a few runs: the first one pays for plans, kernels and memory."""
    best = float("inf")
    for run in range(runs + 1):
        start = time.perf_counter()
        images = procedural_images(count, shape, seed=run, device=device, kinds=kinds)
        images.flatten()[-1].item()  # waits for an accelerator to finish
        if run:
            best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="also every kind on its own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sets = [("leaves", "pink"), *((name,) for name in KINDS if options.each)]
    for kinds in sets:
        for count, shape in CASES:
            took = milliseconds(count, shape, options.device, kinds)
            print(f"{'+'.join(kinds):12} {shape[-1]:4} px x {count:5}: {took:8.1f} ms", flush=True)


if __name__ == "__main__":
    main()
