"""Timing: models take turns, the slower one is found to be slower, nothing is left changed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lbyl import LbylError
from lbyl.latency import WARM_UP, Timing, compare


class Sleeper(nn.Module):
    """Takes as long as it is told, and tells when it runs: what it kept itself would be undone."""

    def __init__(self, name: str, seconds: float, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.name, self.seconds, self.tell = name, seconds, tell
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.tell(self.name)
        assert not self.training and not torch.is_grad_enabled()
        time.sleep(self.seconds)
        return x * self.scale


def test_models_take_turns() -> None:
    diary: list[str] = []
    models = {"a": Sleeper("a", 0.002, diary.append), "b": Sleeper("b", 0.02, diary.append)}
    found = compare(models, torch.zeros(1, 2), repeats=4)
    assert 0.002 <= found["a"].median < found["b"].median >= 0.02
    assert len(found["a"].runs) == 4
    assert diary[2 * WARM_UP :] == ["a", "b", "b", "a"] * 2
    assert models["a"].training  # as it was given


def test_median_and_spread_ignore_a_hiccup() -> None:
    timing = Timing.of([1.0, 1.0, 1.0, 1.0, 100.0])
    assert timing.median == 1.0 and timing.iqr == 0.0
    assert str(Timing.of([0.001, 0.002, 0.003])) == "2.00 ms ± 1.00"


def test_onnx_runtime_and_threads() -> None:
    pytest.importorskip("onnxruntime")
    before = torch.get_num_threads()
    models = {"small": nn.Linear(8, 4), "large": nn.Linear(8, 64)}
    found = compare(models, torch.zeros(2, 8), repeats=3, threads=1, onnx=True)
    assert found.keys() == models.keys() and all(t.median > 0 for t in found.values())
    assert torch.get_num_threads() == before


def test_what_cannot_be_timed() -> None:
    with pytest.raises(LbylError, match="at least 2"):
        compare({"a": nn.Linear(2, 2)}, torch.zeros(1, 2), repeats=1)
    with pytest.raises(LbylError, match="on the CPU"):
        compare({"a": nn.Linear(2, 2)}, torch.zeros(1, 2), device="meta", onnx=True)
