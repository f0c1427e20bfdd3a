"""The demonstration: half of a small network's filters go, and every method puts back what it can.

All that is needed comes with the package and with scikit-learn: a network trained on 8×8 digits,
and the digits it has not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import lbyl
from lbyl import data, zoo
from lbyl.result import Size

NETWORK = "digits"
FIRST = ("none", "neuron-merging", "lbyl", "echo")

SNIPPET = """\
import lbyl
result = lbyl.compress(model, example_inputs, ratio=0.5)  # never changes `model`
lbyl.save(result, "out/")                                 # result.model is ready to use"""


@dataclass(frozen=True)
class Trial:
    """One method's outcome."""

    method: str
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Demo:
    """Everything the demonstration found."""

    ratio: float
    original: float
    before: Size
    after: Size
    images: int
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def run(
    ratio: float = 0.5, seed: int = 0, progress: Callable[[str, int, int], None] | None = None
) -> Demo:
    """Prune the demonstration network with every registered method and measure each."""
    import torch

    images = data.load("digits")
    model = zoo.create(NETWORK, weights="shipped")
    example = torch.zeros(1, *zoo.info(NETWORK).input_shape)
    names = list(FIRST) + [n for n in lbyl.methods.names() if n not in FIRST]
    tick = progress or (lambda stage, done, total: None)
    tick("running the network on procedural images", 0, len(names))
    graph = lbyl.trace(model, example)
    statistics = lbyl.collect(model, example, graph=graph, seed=seed)
    original = data.evaluate(NETWORK, model, images)
    trials: list[Trial] = []
    sizes: list[Size] = []
    for place, name in enumerate(names):
        tick(name, place, len(names))
        start = time.perf_counter()
        analytic = lbyl.methods.resolve(name).analytic
        known = None if analytic else statistics  # that method makes its own from weights
        result = lbyl.compress(
            model, example, ratio, method=name, graph=graph, statistics=known, seed=seed
        )
        seconds = time.perf_counter() - start
        sizes.append(result.after)
        trials.append(Trial(name, data.evaluate(NETWORK, result.model, images), seconds))
    tick("done", len(names), len(names))
    before = Size.of(model, graph)
    return Demo(ratio, original, before, sizes[0], len(images), tuple(trials))
