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

PUBLISHED = ["resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5", "alexnet"]
SMALL = ["regnet", "efficientnet", "inception", "densenet", "lraspp"]
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in [*PUBLISHED, *SMALL[1:]]]


def counted(model: nn.Module, x: torch.Tensor) -> float:
    """Half of the floating-point operations of all convolutions and products, by torch."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() / 2 / len(x)


@pytest.mark.parametrize("name", [*NETWORKS, SMALL[0], *SLOW])
def test_networks_count_as_torch_counts(name: str) -> None:
    if name in NETWORKS:
        model, x = build(name), example(name, 3)
    else:
        pytest.importorskip("torchvision")
        model, x = (small.NETWORKS.get(name) or torchvision_build(name))()
        stir(model)
    result = lbyl.compress(model, x, 0.4, method="none", residual=name in SMALL)
    assert result.before.macs == counted(model, x)
    assert result.after.macs == counted(result.model, x) < result.before.macs
