"""How long a network of 32 px takes from a model to the first answer, by the clock.

Each is compressed in a process of its own, which loads what a compression needs, beside a plain
pass of as many images in the same process. Weights are the trained ones: which units are tried to
be spared depends on them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

import lbyl
from benchmarks.common.networks import load_network
from benchmarks.speed.clock import spent
from lbyl.inputs.batches import image_count

NETWORKS = ("resnet20_cifar10", "resnet56_cifar10", "vgg16_cifar10")
CRITERIA = (None, "l2")  # None: both are tried
AT_ONCE = 128  # images of the plain pass

SHAPE = (3, 32, 32)


def measure(name: str, criterion: str | None) -> dict[str, float]:
    """Seconds of one compression, the first of this process, and of a plain pass after it."""
    model = load_network(name).model
    example = torch.zeros(1, *SHAPE)
    taken = spent(lambda: lbyl.compress(model, example, 0.5, criterion=criterion), "cpu")
    images = torch.randn(image_count(SHAPE), *SHAPE)

    def plain() -> None:
        with torch.inference_mode():
            for some in images.split(AT_ONCE):
                model(some)

    plain()
    return {"seconds": taken.wall, "pass": spent(plain, "cpu").wall}


def first_answers(only: list[str], threads: int | None) -> list[list[Any]]:
    """Rows of network, criterion, seconds, and multiples of a plain pass of as many images."""
    rows: list[list[Any]] = []
    for name in only or NETWORKS:
        for criterion in CRITERIA:
            point = json.dumps([name, criterion])
            command = [sys.executable, "-m", "benchmarks.speed", "first", "--point", point]
            command += ["--threads", str(threads)] if threads else []
            done = subprocess.run(command, capture_output=True, check=True)
            found = json.loads(done.stdout)
            told = found["seconds"], found["seconds"] / found["pass"]
            rows.append([name, criterion or "both", *told, found["pass"]])
    return rows


COLUMNS = ["network", "criterion", "s", "× a pass", "a pass, s"]
