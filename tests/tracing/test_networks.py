"""Published architectures in small, cut at 30 %: exact, smaller, and still models."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from support import published, reference, small
from support.small import NETWORKS

UNITS = {"vit": 2, "swin": 4, "densenet": 14, "convnext": 4, "resnet": 6, "inception": 13}
UNITS |= {"bert": 2, "gpt2": 2, "llama": 2, "phi3": 2}
FAST = ("resnet", "mobilenet", "vit", "llama")  # the others take the same path through more code
COMPILED = ("vit", "resnet", "shufflenet", "llama")  # the sweep compiles all: it takes seconds each
BUILDS = NETWORKS | {k: published.transformer_build(k) for k in ("bert", "gpt2", "llama", "phi3")}
PACKAGES = {"convnext": "timm"} | dict.fromkeys(("bert", "gpt2", "llama", "phi3"), "transformers")


def _made(build: published.Build) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, inputs = build()
    return reference.in_double(published.stir(model), inputs)


def _some(names: Iterable[str], fast: Container[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", _some(BUILDS, FAST))
def test_cut_is_exact_and_survives(name: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(name, "torchvision"))
    model, inputs = _made(BUILDS[name])
    graph = lbyl.trace(model, inputs)
    assert len(graph) >= UNITS.get(name, 5)
    if name == "llama":
        assert all(len(unit.producers) == 2 for unit in graph), "gate and up go together"
    cut = reference.prove_cut(model, inputs, graph)
    reference.assert_exact(cut, graph)
    fresh = BUILDS[name]()[0].double()
    untried = [] if name in COMPILED else ["compile"]
    untried += ["export"] if name == "ssdlite" else []  # boxes steer what torch.export may not ask
    directory = tmp_path / "out"
    assert not reference.assert_survives(model, cut.result, inputs, fresh, directory, untried)


@pytest.mark.parametrize("name", _some(["resnet", "mobilenet", "regnet"], ["mobilenet"]))
def test_residual_channels_are_exact_when_asked_for(name: str) -> None:
    model, inputs = _made(NETWORKS[name])
    plain, graph = lbyl.trace(model, inputs), lbyl.trace(model, inputs, residual=True)
    assert not any(unit.residual for unit in plain)
    assert any(unit.residual and len(unit.producers) > 1 for unit in graph)
    reference.assert_exact(reference.prove_cut(model, inputs, graph), graph)


def test_patterns_choose_the_part_of_a_segmenter() -> None:
    model, inputs = _made(NETWORKS["lraspp"])
    graph = lbyl.trace(model, inputs, include="backbone.*", exclude="backbone.4.*")
    assert graph.names and all(n.startswith("backbone.") for n in graph.names)
    assert not any(n.startswith("backbone.4.") for n in graph.names)
    assert "excluded as asked" in graph.unprunable.values()


def test_every_layer_is_in_a_unit_or_has_a_reason() -> None:
    model, inputs = _made(NETWORKS["inception"])
    graph = lbyl.trace(model, inputs)
    made = {p.name for unit in graph for p in unit.producers}
    layers = {c.name for c in graph.layers if c.groups == 1}
    assert made | graph.unprunable.keys() >= layers
    assert not made & graph.unprunable.keys()


def test_tracing_leaves_the_network_and_torch_as_they_were() -> None:
    model, inputs = _made(small.swin)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    hooks = {n: len(v) for n, v in vars(nn.modules.module).items() if n.startswith("_global_f")}
    torch.set_num_threads(2)
    try:
        lbyl.trace(model.train(), inputs)
        assert torch.get_num_threads() == 2
        with pytest.raises(lbyl.LbylError):
            lbyl.trace(small.vit()[0], torch.zeros(1, 7))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert model.training
    assert attributes == {n: set(vars(m)) for n, m in model.named_modules()}
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert hooks == {n: len(getattr(nn.modules.module, n)) for n in hooks}


class Auxiliary(nn.Module):
    """A second head that only training runs, on features that evaluation reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 12)
        self.head, self.aside = nn.Linear(12, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        features = self.first(x).relu()
        main = self.head(self.second(features).relu())
        return (main, self.aside(features)) if self.training else main


def test_what_a_head_reads_in_training_only_is_unprunable() -> None:
    model, x = Auxiliary(), torch.randn(3, 6)
    graph = lbyl.trace(model, x)
    assert graph.names == ["second"]
    assert graph.unprunable["first"] == "it is read by aside, which runs in training only"
    assert graph.unprunable["aside"] == "it runs in training only"
    slim = lbyl.compress(model, x, 0.5, method="none").model.train()
    assert [y.shape for y in slim(x)] == [(3, 4), (3, 4)]


# ---------------------------------- no network has fewer units than its page tells

ROWS = json.loads((Path(__file__).parents[2] / "docs" / "results" / "coverage.json").read_text())
SAMPLE = "torchvision/resnet18 timm/lcnet_050 timm/regnetx_002 transformers/llama".split()


def test_the_page_tells_of_every_network() -> None:
    assert set(SAMPLE) <= ROWS.keys() and len(ROWS) == 209
    assert all(row["units"] >= 0 and row["channels"] >= row["units"] for row in ROWS.values())


@pytest.mark.parametrize("name", _some(ROWS, SAMPLE))
def test_units_and_channels_do_not_fall(name: str) -> None:
    for package in ("torchvision", "timm", "transformers"):
        if name.startswith(package):
            pytest.importorskip(package)
    torch.manual_seed(0)
    model, inputs = published.every()[name]()
    graph = lbyl.trace(published.stir(model), inputs)
    assert len(graph) >= ROWS[name]["units"]
    assert graph.channels >= ROWS[name]["channels"]
