"""Multiply–accumulates against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lbyl
from support import small
from support.networks import NETWORKS, build, example
from support.published import stir, torchvision_build

pytest.importorskip("torchvision")
PUBLISHED = ["resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5", "alexnet"]


def counted(model: nn.Module, x: torch.Tensor) -> float:
    """Half of the floating-point operations of all convolutions and products, by torch."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() / 2 / len(x)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_networks_count_as_torch_counts(name: str) -> None:
    model, x = torchvision_build(name)()
    stir(model)
    result = lbyl.compress(model, x, 0.3, method="none")
    assert result.before.macs == counted(model, x)
    assert result.after.macs == counted(result.model, x) < result.before.macs


@pytest.mark.parametrize("name", ["regnet", "efficientnet", "inception", "densenet", "lraspp"])
def test_small_networks_count_as_torch_counts(name: str) -> None:
    model, x = small.NETWORKS[name]()
    stir(model)
    result = lbyl.compress(model, x, 0.3, method="none", residual=True)
    assert result.before.macs == counted(model, x)
    assert result.after.macs == counted(result.model, x)


@pytest.mark.parametrize("name", NETWORKS)
def test_tiny_networks_count_as_torch_counts(name: str) -> None:
    model, x = build(name), example(name, 3)
    result = lbyl.compress(model, x, 0.5, method="none")
    assert result.before.macs == counted(model, x)
    assert result.after.macs == counted(result.model, x)
