"""No published network has fewer units than the page of published networks tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lbyl
from support import published

ROWS = json.loads((Path(__file__).parents[2] / "docs" / "results" / "coverage.json").read_text())
SAMPLE = "torchvision/resnet18 timm/lcnet_050 timm/regnetx_002 transformers/llama".split()
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ROWS if name not in SAMPLE]


def test_the_page_tells_of_every_network() -> None:
    assert set(SAMPLE) <= ROWS.keys() and len(ROWS) == 209
    assert all(row["units"] >= 0 and row["channels"] >= row["units"] for row in ROWS.values())


@pytest.mark.parametrize("name", [*SAMPLE, *OTHERS])
def test_units_and_channels_do_not_fall(name: str) -> None:
    for package in ("torchvision", "timm", "transformers"):
        if name.startswith(package):
            pytest.importorskip(package)
    torch.manual_seed(0)
    model, inputs = published.every()[name]()
    graph = lbyl.trace(published.stir(model), inputs)
    assert len(graph) >= ROWS[name]["units"]
    assert graph.channels >= ROWS[name]["channels"]
