"""Complex weights are in the files of a slim network bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lbyl


class Spectral(nn.Module):
    """A layer of real weights, and an operator of complex ones."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 8)
        self.turn = nn.Parameter(torch.randn(8, dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x).relu()) * self.turn).abs().to(x.dtype)


def build(kind: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Spectral(kind).eval()


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_weights_are_saved_and_loaded(kind: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(3, 6)
    result = lbyl.compress(build(kind), x, 0.5)
    lbyl.save(result, tmp_path / "out")
    fresh = build(kind)
    with torch.no_grad():
        fresh.turn.zero_()
    lbyl.load(tmp_path / "out", fresh)
    assert torch.equal(fresh.turn, result.model.turn)
    assert torch.equal(fresh(x), result.model(x))


@pytest.mark.parametrize("told", ["[", "3", '["nothing"]', '["a.bias"]', '[["turn"]]'])
def test_a_file_that_misnames_complex_numbers_is_one_clear_error(told: str, tmp_path: Path) -> None:
    result = lbyl.compress(build(torch.complex128), torch.randn(3, 6), 0.5)
    lbyl.save(result, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    save_file(load_file(file), file, {"complex128": told})
    with pytest.raises(lbyl.LbylError):
        lbyl.load(tmp_path / "out", build(torch.complex128))
