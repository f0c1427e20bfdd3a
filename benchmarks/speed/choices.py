"""What the choices that a user can make cost beside the plain one: criteria, budgets, methods."""

from __future__ import annotations

from functools import partial
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
    walls: dict[str, list[float]] = {name: [] for name in names}
    stages: dict[str, str] = {}
    # Round by round: hosts are slower at one time than at another, and all choices see both.
    for _ in range(runs):
        for name in names:
            taken: dict[str, float] = {}
            walls[name].append(spent(partial(_compress, model, example, name, taken), device).wall)
            if walls[name][-1] == min(walls[name]):
                stages[name] = ", ".join(f"{stage} {took:.2f}" for stage, took in taken.items())
    rows: list[list[Any]] = []
    for name in names:
        best = min(walls[name])
        rows.append([name, best, best / min(walls[names[0]]), walls[name][0], stages[name]])
        if profiles is not None:
            profiles.mkdir(parents=True, exist_ok=True)
            work = partial(_compress, model, example, name, {})
            profiled(work, profiles / f"{name.replace(' ', '-')}.prof")
    return rows


def _compress(model: nn.Module, example: Tensor, name: str, taken: dict[str, float]) -> None:
    taken |= lbyl.compress(model, example, **CHOICES[name]).seconds
