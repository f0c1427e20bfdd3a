"""Images with channels innermost in memory: on the CPU convolutions and BatchNorm run faster so.

The network itself is not touched: its functions follow the layout of what they are given.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lbyl.runtime.run import Inputs, call_model, device_of, evaluation_mode, tensors_in


def channels_last(inputs: Inputs) -> Inputs:
    """The same inputs, images among them with channels innermost."""
    return tree_map_only(Tensor, _innermost, inputs)


def _innermost(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if _is_image(x) else x


def _is_image(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_floating_point()


@torch.no_grad()
def prefers_channels_last(model: nn.Module, example_inputs: Inputs) -> bool:
    """Whether the network runs on the CPU, convolves, and computes the same of such images.

    Some do not: one that views its features as vectors raises, and one that reads memory by hand
    would compute something else.
    """
    convolves = any(p.dim() == 4 for p in model.parameters())
    if device_of(model).type != "cpu" or not convolves:
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator).to(x) if _is_image(x) else x

    plain = tree_map_only(Tensor, drawn, example_inputs)
    try:
        with evaluation_mode(model):
            same = [tensors_in(call_model(model, x)) for x in (plain, channels_last(plain))]
    except Exception:
        return False
    return len(same[0]) == len(same[1]) > 0 and all(_alike(a, b) for a, b in zip(*same))


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    return bool((one - other).abs().max() <= 1e-3 * one.abs().max() + 1e-9) if one.numel() else True
