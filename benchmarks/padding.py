"""Channels that are never used, added so that a GPU's matrix units are fed in their own measure.

A layer pruned by 30 % may be left with 179 channels, which tensor cores cannot take in steps of
eight. Added filters are all zeros on both sides of their BatchNorm, and so are their gradients:
what the network computes and learns stays what the slim network would.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def padded(model: nn.Module, multiple: int = 8) -> nn.Module:
    """A copy whose residual blocks are as wide inside as the next multiple."""
    model = copy.deepcopy(model)
    for block in model.modules():
        layers = [getattr(block, name, None) for name in ("conv1", "bn1", "conv2", "bn2", "conv3")]
        for conv, norm, consumer in (layers[:3], layers[2:]):
            if isinstance(conv, nn.Conv2d) and isinstance(consumer, nn.Conv2d):
                _widen(conv, norm, consumer, multiple)
    return model


def _widen(conv: nn.Conv2d, norm: Any, consumer: nn.Conv2d, multiple: int) -> None:
    extra = -conv.out_channels % multiple
    if not extra:
        return
    conv.weight = _grown(conv.weight, (0, 0) * 3 + (0, extra))
    if conv.bias is not None:
        conv.bias = _grown(conv.bias, (0, extra))
    norm.weight, norm.bias = _grown(norm.weight, (0, extra)), _grown(norm.bias, (0, extra))
    norm.running_mean = F.pad(norm.running_mean, (0, extra))
    norm.running_var = F.pad(norm.running_var, (0, extra), value=1.0)
    consumer.weight = _grown(consumer.weight, (0, 0) * 2 + (0, extra))
    conv.out_channels += extra
    norm.num_features += extra
    consumer.in_channels += extra


def _grown(parameter: Tensor, by: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(F.pad(parameter.detach(), by))
