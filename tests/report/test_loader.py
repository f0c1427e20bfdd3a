"""The program in the report is run, on files that were saved."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from lbyl.app.report import loader_snippet
from support.networks import randomise


def run(program: str, **names: Any) -> nn.Module:
    scope = dict(names)
    exec(compile(program, "loader", "exec"), scope)
    model = scope["model"]
    assert isinstance(model, nn.Module)
    return model


def sizes(model: nn.Module) -> list[str]:
    return [repr(m) for m in model.modules()]


def test_it_loads_a_class_that_can_be_imported_with_torch_and_safetensors_alone(
    digits: Any, tmp_path: Path
) -> None:
    _, example, result = digits
    lbyl.save(result, tmp_path)
    program = loader_snippet(result, str(tmp_path / "model.safetensors"))
    loaded = run(program)
    assert sizes(loaded) == sizes(result.model)
    assert torch.equal(loaded(example), result.model(example))
    nodes = ast.walk(ast.parse(program))
    imported = [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    assert imported == ["safetensors.torch", "torch", "lbyl.app.sources.zoo.digits"]
    assert max(map(len, loader_snippet(result).splitlines())) <= 100
    other = loader_snippet(result, str(tmp_path / "model.safetensors"), "original = make()")
    with pytest.raises(ValueError, match="another network"):
        run(other, make=lambda: nn.Linear(2, 2))


class Depthwise(nn.Module):
    """Grouped, transposed, tied and un-normalised layers, and a bias that restoration adds."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 12, 1, bias=False)
        self.bn = nn.BatchNorm2d(12)
        self.act = nn.PReLU(12)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.norm = nn.GroupNorm(4, 12)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2, bias=False)
        self.head = nn.Linear(8, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.again.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.depth(self.act(self.bn(self.expand(x)))))
        x = torch.relu(self.up(torch.relu(x))).mean((2, 3))
        return self.last(torch.relu(self.again(torch.relu(self.head(x)))))


def test_it_refits_groups_and_keeps_ties(tmp_path: Path) -> None:
    model, example = randomise(Depthwise()), torch.randn(2, 3, 8, 8)
    result = lbyl.compress(model, example, 0.5, data=64)
    lbyl.save(result, tmp_path)
    build = "original = make()"
    program = loader_snippet(result, str(tmp_path / "model.safetensors"), build)
    loaded = run(program, make=Depthwise)
    assert sizes(loaded) == sizes(result.model)
    assert loaded.last.weight is loaded.again.weight
    # memory may lie askew in a file, which changes the last bit of what kernels compute
    assert torch.allclose(loaded(example), result.model.eval()(example), atol=1e-5)


def test_a_class_without_an_address_is_left_to_the_reader() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    result = lbyl.compress(model, torch.randn(2, 4), 0.5, method="none")
    program = loader_snippet(result)
    assert "original = build_network()" in program
    ast.parse(program)
