"""A small real report, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lbyl
from lbyl.app.report import gather, write_report
from lbyl.app.sources import zoo


@pytest.fixture(scope="session")
def digits() -> tuple[lbyl.Prepared, torch.Tensor, lbyl.Result]:
    """The shipped network prepared, an example input and what came of halving it."""
    torch.manual_seed(0)
    model = zoo.create("digits", "shipped")
    example = torch.randn(2, 1, 8, 8)
    prepared = lbyl.prepare(model, example, data=256)
    return prepared, example, prepared.compress(0.5)


@pytest.fixture(scope="session")
def filled(digits: Any) -> dict[str, Any]:
    """Everything a report can be given."""
    comparison = [
        {"method": method, "criterion": "l2", "ratio": ratio, "accuracy": 97 - loss * ratio}
        for method, loss in (("none", 90), ("neuron-merging", 50), ("lbyl", 30), ("echo", 4))
        for ratio in (0.1, 0.3, 0.5)
    ]
    return {
        "accuracy": {"original": 97.0, "slim": 95.5},
        "comparison": comparison,
        "latency": {"before": 2.5, "after": 1.25, "device": "CPU"},
        "command": "lbyl compress lbyl:digits --ratio 0.5",
        **gather(digits[0], digits[2]),
    }


@pytest.fixture(scope="session")
def report(digits: Any, filled: dict[str, Any], tmp_path_factory: Any) -> Path:
    return write_report(digits[2], tmp_path_factory.mktemp("report") / "report.html", **filled)
