"""Half precision and other orders of memory come back as they came, on the model's device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lbyl


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10), nn.ReLU(),
        nn.Conv2d(10, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_comes_back_in_the_precision_it_had(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    result = lbyl.compress(model, torch.zeros(2, 3, 8, 8, dtype=dtype), 0.5, data=32)
    before, after = ([t.dtype for t in m.state_dict().values()] for m in (model, result.model))
    assert after[: len(before)] == before and set(after[len(before) :]) <= {dtype}
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    assert result.model(x).dtype == dtype and bool(result.model(x).isfinite().all())


def test_weights_with_channels_innermost_come_back_so() -> None:
    plain = lbyl.compress(network(), torch.zeros(2, 3, 8, 8), {"*": 0.5}, data=32).model
    model = network().to(memory_format=torch.channels_last)
    slim = lbyl.compress(model, torch.zeros(2, 3, 8, 8), {"*": 0.5}, data=32).model
    for name, weight in slim.named_parameters():
        if weight.dim() == 4:
            assert weight.is_contiguous(memory_format=torch.channels_last), name
    assert plain[3].weight.is_contiguous()
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(slim(x), plain(x), rtol=1e-3, atol=1e-4)
