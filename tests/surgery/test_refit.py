"""Attributes tell the sizes that tensors have, whichever tensors a module has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lbyl.surgery.refit import refit_attributes
from lbyl.torchkit.tensors import replace_tensors, tensors


class Conv1D(nn.Module):
    """As Hugging Face's GPT-2 has it: the weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.ones(nx, nf)), nn.Parameter(torch.ones(nf))


def narrowed(module: nn.Module, sizes: dict[str, tuple[int, ...]]) -> nn.Module:
    slim = copy.deepcopy(module)
    values = {name: torch.ones(sizes[name]) for name in tensors(module) if name in sizes}
    replace_tensors(slim, values)
    refit_attributes(slim, module)
    return slim


@pytest.mark.parametrize("kept", ["weight", "running_mean"])
def test_a_batchnorm_tells_its_channels_with_weights_or_without(kept: str) -> None:
    options = {"affine": kept == "weight", "track_running_stats": kept != "weight"}
    slim = narrowed(
        nn.BatchNorm2d(8, **options), dict.fromkeys(("weight", "bias", "running_mean"), (5,))
    )
    assert slim.num_features == 5


def test_a_turned_layer_tells_inputs_and_outputs() -> None:
    slim = narrowed(Conv1D(nf=6, nx=4), {"weight": (3, 5), "bias": (5,)})
    assert (slim.nx, slim.nf) == (3, 5)
