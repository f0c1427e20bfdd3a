"""A slim network runs on the user's own example before it is called a success."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import lbyl


class Late(nn.Module):
    """Behaves at every width until it is armed; then a narrower one does something else."""

    armed: ClassVar[bool] = False

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 6)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        if not self.armed or self.a.out_features == 16:
            return y
        if self.how == "error":
            raise ValueError("this kernel wants widths of 16")
        return y[:, :2] if self.how == "shape" else y.double()


@pytest.mark.parametrize(
    ("how", "told"), [("error", "widths of 16"), ("shape", r"\(4, 2\)"), ("type", "float64")]
)
def test_what_runs_otherwise_than_the_original_is_not_returned(
    how: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)

    def arm(stage: str, step: int, steps: int) -> None:
        monkeypatch.setattr(Late, "armed", stage == "forecasting")

    model, x = Late(how).eval(), torch.randn(4, 8)
    with pytest.raises(lbyl.LbylError, match=f"on the example inputs it .*{told}"):
        lbyl.compress(model, x, 0.5, progress=arm)
    monkeypatch.setattr(Late, "armed", False)
    assert len(lbyl.compress(model, x, 0.5).plan.kept["a"]) == 8
