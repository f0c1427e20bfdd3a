"""Weights and plan are saved, whatever the files beside them would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 8}
SPECTROGRAM = {
    **SIZES,
    "patch_size": 8,
    "max_length": 32,
    "num_mel_bins": 16,
    "frequency_stride": 8,
    "time_stride": 8,
}
TOWERS = {
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGE),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", IMAGE),
    "BEiT": ("BeitForImageClassification", "BeitConfig", IMAGE),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", IMAGE),
    "CLIP, projected": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", IMAGE),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", IMAGE),
    "AST": ("ASTForAudioClassification", "ASTConfig", SPECTROGRAM),
    "Data2VecVision": ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", IMAGE),
    "I-JEPA": ("IJepaModel", "IJepaConfig", IMAGE),
}


def tower(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    kind, config, sizes = TOWERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    if name == "AST":
        return model, {"input_values": torch.randn(1, 32, 16)}
    return model, {"pixel_values": torch.randn(1, 3, 32, 32)}


@torch.no_grad()
def difference(a: nn.Module, b: nn.Module, x: dict[str, Tensor]) -> float:
    return float((a.eval()(**x)[0] - b.eval()(**x)[0]).abs().max())


@pytest.mark.parametrize("name", TOWERS)
def test_vision_towers_of_transformers_are_saved_and_loaded_by_both_libraries(
    name: str, tmp_path: Path
) -> None:
    model, x = tower(name)
    result = lbyl.compress(model, x, 0.5, data=[x], progress=False)
    out = lbyl.save(result, tmp_path / "out")
    assert difference(lbyl.load(out, tower(name)[0]), result.model, x) == 0
    loaded = type(model).from_pretrained(out)  # type: ignore[attr-defined]
    assert difference(loaded, result.model, x) < 1e-5


class Config:
    """The configuration of somebody's own class; one of its parts raises something odd."""

    def __init__(self, hidden: int = 16, where: str = "") -> None:
        self.hidden, self.where = hidden, where

    def reach(self, place: str) -> None:
        if place == self.where:
            raise ZeroDivisionError("nobody expects this")

    @property
    def model_type(self) -> str:
        self.reach("model_type")
        return "odd"

    def to_dict(self) -> dict[str, Any]:
        self.reach("to_dict")
        return {"hidden": self.hidden, "where": self.where}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        made = cls(**values)
        made.reach("from_dict")
        return made

    def to_json_string(self) -> str:
        self.reach("to_json_string")
        return json.dumps({"hidden": self.hidden})


class Odd(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.a, self.b = nn.Linear(8, config.hidden), nn.Linear(config.hidden, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.config.where == "forward" and self.a.out_features < 16:
            self.calls += 1
        return self.b(self.a(x).relu())

    def tie_weights(self) -> None:
        self.config.reach("tie_weights")


@pytest.mark.parametrize(
    "where", ["to_dict", "from_dict", "model_type", "to_json_string", "tie_weights"]
)
def test_what_a_configuration_raises_leaves_weights_and_plan_and_a_note(
    where: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    result = lbyl.compress(Odd(Config(where=where)).eval(), x, 0.5, progress=False)
    with pytest.warns(UserWarning, match=r"config\.json"):
        out = lbyl.save(result, tmp_path / "out")
    noted = json.loads((out / "plan.json").read_text())["notes"]
    assert any("config.json" in line for line in noted)
    loaded = lbyl.load(out, Odd(Config()).eval())
    assert torch.equal(loaded(x), result.model(x))


def test_trying_a_configuration_changes_no_buffer_that_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    result = lbyl.compress(Odd(Config(where="forward")).eval(), x, 0.5, progress=False)
    before = result.model.state_dict()["calls"].clone()
    out = lbyl.save(result, tmp_path / "out")
    assert (out / "config.json").is_file()
    assert torch.equal(result.model.state_dict()["calls"], before)
    assert torch.equal(lbyl.load(out, Odd(Config())).state_dict()["calls"], before)


def test_files_of_an_earlier_network_do_not_stay_beside_the_weights_of_another(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    said, unsaid = (Odd(Config(where=where)).eval() for where in ("", "from_dict"))
    out = lbyl.save(lbyl.compress(said, x, 0.5, progress=False), tmp_path / "out")
    assert (out / "config.json").is_file()
    for name in ("report.html", "model.onnx", "mine.txt"):
        (out / name).write_text("earlier")
    with pytest.warns(UserWarning, match=r"config\.json"):
        lbyl.save(lbyl.compress(unsaid, x, 0.25, progress=False), out)
    assert sorted(p.name for p in out.iterdir()) == ["mine.txt", "model.safetensors", "plan.json"]


class Shared(nn.Module):
    """Two layers whose weights are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        memory = torch.randn(128)
        self.b.weight = nn.Parameter(memory[:128].view(8, 16))
        self.c.weight = nn.Parameter(memory[:64].view(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


def test_weights_that_are_views_of_one_memory_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    result = lbyl.compress(Shared().eval(), x, {"b": 0.5}, progress=False)
    out = lbyl.save(result, tmp_path / "out")
    assert torch.equal(lbyl.load(out, Shared().eval())(x), result.model(x))
    whole = lbyl.compress(Shared().eval(), x, {"a": 0.0}, progress=False)
    out = lbyl.save(whole, tmp_path / "whole")
    assert torch.equal(lbyl.load(out, Shared().eval())(x), whole.model(x))
