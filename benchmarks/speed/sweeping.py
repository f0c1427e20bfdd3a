"""A sweep with one worker and with two, one core each, on the same rows; both are started."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.speed.clock import spent
from lbyl.app.sweep import Engine, Point, Setting, Store, Subject, points, sweep

NETWORK = """
import torch
from torchvision import models


def network():
    torch.manual_seed(0)
    return models.get_model("{name}")
"""
RATIOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def workers(network: str, size: int) -> list[list[Any]]:
    """Rows of workers, rows of the sweep, seconds, and how many times as fast as one worker."""
    from joblib import Parallel, delayed  # the other benchmarks do without

    setting = Setting(input_shape=(3, size, size), threads=1)
    rows: list[list[Any]] = []
    for jobs in (1, 2):
        with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "sweep.db") as store:
            file = Path(folder) / "net.py"
            file.write_text(NETWORK.format(name=network))
            grid = points(
                [Subject(f"{file}:network")],
                [("ratio", ratio) for ratio in RATIOS],
                criteria=["l2", "echo"],
                methods_named=["echo"],
                seeds=[0, 1],  # each has statistics of its own, so that both have some to collect
            )

            def work(grid: list[Point] = grid, jobs: int = jobs, store: Store = store) -> None:
                sweep(grid, setting, store, Engine(jobs))

            if jobs > 1:  # a sweep that is worth two processes is long beside their start
                Parallel(n_jobs=jobs)(
                    delayed(import_module)("lbyl.app.sweep.work") for _ in range(8)
                )
            seconds = spent(work, "cpu").wall
        rows.append([jobs, len(grid), seconds, rows[0][2] / seconds if rows else 1.0])
    return rows
