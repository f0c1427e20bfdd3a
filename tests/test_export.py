"""ONNX and torch.export: any batch size, the same numbers, nothing half written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app.cli.app import app
from lbyl.app.export import export_onnx
from lbyl.app.sources import zoo

onnxruntime = pytest.importorskip("onnxruntime")


class Pair(nn.Module):
    """Two inputs by name, two outputs, and dropout that must be off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(3, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        mixed = self.drop(self.a(left) + self.b(right))
        return {"mixed": mixed, "positive": mixed.relu()}


def test_a_slim_network_runs_at_any_batch_size(tmp_path: Path) -> None:
    model, example = zoo.create("digits", "shipped"), torch.zeros(1, 1, 8, 8)
    slim = lbyl.compress(model, example, 0.4, method="lbyl").model
    path = tmp_path / "deep" / "m.onnx"
    assert 0 <= export_onnx(slim, example, path) < 1e-4
    session = onnxruntime.InferenceSession(str(path))
    for batch in (1, 5):
        x = torch.randn(batch, 1, 8, 8)
        (given,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(given), slim(x).detach(), rtol=1e-4, atol=1e-4)
    assert [p.name for p in path.parent.iterdir()] == ["m.onnx"]


def test_inputs_by_name_and_several_outputs(tmp_path: Path) -> None:
    model = Pair().train()
    example = {"left": torch.zeros(1, 4), "right": torch.zeros(1, 3)}
    assert export_onnx(model, example, tmp_path / "m.onnx") < 1e-5
    assert model.training and model.drop.training  # as it was given


def test_what_differs_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_text("old")
    with pytest.raises(lbyl.LbylError, match="nothing was written"):
        export_onnx(nn.Linear(64, 8), torch.zeros(1, 64), path, tolerance=-1)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


class Choosy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x - 1


def test_a_model_that_cannot_be_followed_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(lbyl.LbylError, match="cannot follow this model"):
        export_onnx(Choosy(), torch.zeros(1, 3), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_program_runs_at_any_batch_size(tmp_path: Path) -> None:
    words = ["export", "lbyl:digits", "--weights", "shipped", "--out", str(tmp_path / "m.pt2")]
    app(words, standalone_mode=False)
    program = torch.export.load(tmp_path / "m.pt2").module()
    for batch in (1, 4):
        x = torch.randn(batch, 1, 8, 8)
        torch.testing.assert_close(program(x), zoo.create("digits", "shipped")(x))
