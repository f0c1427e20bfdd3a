"""How long the procedural images take: 1,000 at 32 px and 256 at 224 px.

python -m benchmarks.images_speed [--device cuda] [--threads 2]
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.common.environment import default_device
from lbyl.inputs.images.procedural import procedural_images

CASES = ((1000, (3, 32, 32)), (256, (3, 224, 224)))


def milliseconds(count: int, shape: tuple[int, ...], device: str, runs: int = 3) -> float:
    """Best of a few runs: the first one pays for plans, kernels and memory."""
    best = float("inf")
    for run in range(runs + 1):
        start = time.perf_counter()
        images = procedural_images(count, shape, seed=run, device=device)
        images.flatten()[-1].item()  # waits for an accelerator to finish
        if run:
            best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for count, shape in CASES:
        taken = milliseconds(count, shape, options.device)
        print(f"{shape[-1]:4} px x {count:5}: {taken:8.1f} ms", flush=True)


if __name__ == "__main__":
    main()
