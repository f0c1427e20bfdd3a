"""Small published networks, cut at 30 %: exact, smaller, and still models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
import published
import reference


def _vit() -> tuple[nn.Module, Any]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)
    return model, torch.randn(2, 3, 32, 32)


def _swin() -> tuple[nn.Module, Any]:
    from torchvision.models import SwinTransformer

    sizes: dict[str, Any] = {"depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return SwinTransformer([2, 2], 16, **sizes, num_classes=10), torch.randn(1, 3, 32, 32)


def _densenet() -> tuple[nn.Module, Any]:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2, 2), 16, num_classes=10), torch.randn(2, 3, 64, 64)


def _convnext() -> tuple[nn.Module, Any]:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=9), torch.randn(
        2, 3, 32, 32
    )


NETWORKS: dict[str, published.Build] = {
    "vit": _vit,
    "swin": _swin,
    "densenet": _densenet,
    "convnext": _convnext,
    "ssdlite": published.detector_build("ssdlite320_mobilenet_v3_large"),
}
NETWORKS |= {
    name: published.torchvision_build(name)
    for name in """
    resnet18 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 googlenet efficientnet_b0
    regnet_y_400mf lraspp_mobilenet_v3_large
    """.split()
}
UNITS = {"vit": 2, "swin": 4, "resnet18": 8, "squeezenet1_1": 25, "densenet": 14, "convnext": 4}


def _made(build: published.Build) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, inputs = build()
    return reference.in_double(published.stir(model), inputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_cut_is_exact_and_survives(name: str, tmp_path: Path) -> None:
    if "vit" not in name:
        pytest.importorskip("torchvision")
    if name == "convnext":
        pytest.importorskip("timm")
    model, inputs = _made(NETWORKS[name])
    graph = lbyl.trace(model, inputs)
    assert len(graph) >= UNITS.get(name, 5)
    proof = reference.prove_cut(model, inputs, graph)
    reference.assert_exact(proof, graph)
    fresh = NETWORKS[name]()[0].double()
    untried = ["export"] if name == "ssdlite" else []  # boxes steer what torch.export may not ask
    directory = tmp_path / "out"
    assert not reference.assert_survives(model, proof.result, inputs, fresh, directory, untried)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "regnet_y_400mf"])
def test_residual_streams_are_exact_when_asked_for(name: str) -> None:
    model, inputs = _made(NETWORKS[name])
    plain, graph = lbyl.trace(model, inputs), lbyl.trace(model, inputs, streams=True)
    assert not any(unit.stream for unit in plain)
    assert any(unit.stream and len(unit.producers) > 1 for unit in graph)
    reference.assert_exact(reference.prove_cut(model, inputs, graph), graph)


def test_patterns_choose_the_part_of_a_segmenter() -> None:
    model, inputs = _made(NETWORKS["lraspp_mobilenet_v3_large"])
    graph = lbyl.trace(model, inputs, modules="backbone.*", skip="backbone.4.*")
    assert graph.names and all(n.startswith("backbone.") for n in graph.names)
    assert not any(n.startswith("backbone.4.") for n in graph.names)
    assert "skipped as asked" in graph.left_alone.values()


def test_every_layer_is_in_a_unit_or_has_a_reason() -> None:
    model, inputs = _made(NETWORKS["googlenet"])
    graph = lbyl.trace(model, inputs)
    made = {p.name for unit in graph for p in unit.producers}
    layers = {c.name for c in graph.contractions if c.groups == 1}
    assert made | graph.left_alone.keys() >= layers
    assert not made & graph.left_alone.keys()


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "phi3"])
def test_language_models_lose_mlp_neurons(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    build = published.transformer_build(kind)
    model, inputs = _made(build)
    graph = lbyl.trace(model, inputs)
    assert len(graph) == 2
    if kind == "llama":
        assert all(len(unit.producers) == 2 for unit in graph), "gate and up go together"
    proof = reference.prove_cut(model, inputs, graph)
    reference.assert_exact(proof, graph)
    fresh = build()[0].double()
    assert not reference.assert_survives(model, proof.result, inputs, fresh, tmp_path / "out")


def test_tracing_leaves_the_network_as_it_was() -> None:
    model, inputs = _made(_swin)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    lbyl.trace(model.train(), inputs)
    assert model.training
    assert attributes == {n: set(vars(m)) for n, m in model.named_modules()}
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


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


def test_what_a_head_reads_in_training_only_is_left_alone() -> None:
    model, x = Auxiliary(), torch.randn(3, 6)
    graph = lbyl.trace(model, x)
    assert graph.names == ["second"]
    assert graph.left_alone["first"] == "it is read by aside, which runs in training only"
    assert graph.left_alone["aside"] == "it runs in training only"
    slim = lbyl.compress(model, x, 0.5, method="none", graph=graph).model.train()
    assert [y.shape for y in slim(x)] == [(3, 4), (3, 4)]


def test_no_hook_stays_behind() -> None:
    hooks = {n: v for n, v in vars(nn.modules.module).items() if n.startswith("_global_forward")}
    before = {name: len(kept) for name, kept in hooks.items()}
    lbyl.trace(*_made(_swin))
    assert before == {name: len(kept) for name, kept in hooks.items()}


def test_large_weights_are_finite_though_their_sum_is_not() -> None:
    from lbyl.surgery import is_finite

    assert is_finite(torch.full((3,), 3e38))
    assert not is_finite(torch.tensor([1.0, float("inf"), float("-inf")]))
    assert not is_finite(torch.tensor([1.0, float("nan")]))


def test_threads_are_as_before() -> None:
    torch.set_num_threads(2)
    try:
        lbyl.trace(*_made(_vit))
        assert torch.get_num_threads() == 2
        with pytest.raises(lbyl.LbylError):
            lbyl.trace(_vit()[0], torch.zeros(1, 7))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
