"""What the choices that a user can make cost beside the plain one: criteria, budgets, methods."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import lbyl
from benchmarks.speed.clock import spent, wait
from benchmarks.speed.profiled import profiled

CHOICES: dict[str, dict[str, Any]] = {
    "l2": {"ratio": {"*": 0.3}, "criterion": "l2"},
    "echo": {"ratio": {"*": 0.3}, "criterion": "echo"},
    "as chosen": {"ratio": 0.3},
    "budget macs=0.6": {"ratio": lbyl.Budget(macs=0.6)},
    "budget macs=0.6, l2": {"ratio": lbyl.Budget(macs=0.6), "criterion": "l2"},
    "fold": {"ratio": {"*": 0.3}, "method": "fold"},
    "lbyl": {"ratio": {"*": 0.3}, "method": "lbyl"},
}


def choices(
    model: nn.Module,
    example: Tensor,
    names: list[str],
    profiles: Path | None = None,
    runs: int = 1,
) -> list[list[Any]]:
    """Rows of name, seconds end to end from a model to a smaller one, and multiples of `l2`.

    Of several runs the least counts; the first, which loads what a choice needs, stands beside it.
    `profiles`: a folder for a profile of each, which is run again for it.
    """
    device = str(example.device)
    lbyl.compress(model, example, **CHOICES["l2"])  # warms up
    wait(device)
    rows: list[list[Any]] = []
    plain = 0.0
    for name in names:
        taken: dict[str, float] = {}

        def work(name: str = name, taken: dict[str, float] = taken) -> None:
            taken |= lbyl.compress(model, example, **CHOICES[name]).seconds

        best, walls = math.inf, []
        for _ in range(runs):
            walls.append(spent(work, device).wall)
            if walls[-1] < best:
                best = walls[-1]
                parts = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in taken.items())
        plain = plain or best
        rows.append([name, best, best / plain, walls[0], parts])
        if profiles is not None:
            profiles.mkdir(parents=True, exist_ok=True)
            profiled(work, profiles / f"{name.replace(' ', '-')}.prof")
    return rows
