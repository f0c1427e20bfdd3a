"""A model's tensors: what is finite, what is tied, what lies askew in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lbyl.errors import LbylError
from lbyl.torchkit.tensors import can_take_bias, is_finite, replace_tensors, shape_of, tensors


def test_large_weights_are_finite_though_their_sum_is_not() -> None:
    assert is_finite(torch.full((3,), 3e38))
    assert not is_finite(torch.tensor([1.0, float("inf"), float("-inf")]))
    assert not is_finite(torch.tensor([1.0, float("nan")]))


def test_values_of_any_shape_take_the_place_of_the_old() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    replace_tensors(model, {"0.weight": torch.ones(2, 4), "1.running_mean": torch.zeros(2)})
    assert model[0].weight.shape == (2, 4) and not model[0].weight.requires_grad
    assert isinstance(model[0].weight, nn.Parameter) and model[1].running_mean.shape == (2,)
    assert tensors(model)["0.weight"] is model[0].weight


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    replace_tensors(model, {"0.weight": torch.zeros(4, 4)})
    assert model[1].weight is model[0].weight and not bool(model[0].weight.any())


def test_a_bias_is_made_where_a_layer_can_have_one() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    assert can_take_bias(model, "0") and not can_take_bias(model, "1")
    replace_tensors(model, {"0.bias": torch.ones(3)})
    assert torch.equal(model[0].bias, torch.ones(3))
    with pytest.raises(LbylError, match=r"1 .ReLU. has no .*'bias'"):
        replace_tensors(model, {"1.bias": torch.ones(3)})


def test_values_that_lie_askew_get_memory_of_their_own() -> None:
    model = nn.Linear(4, 3)
    value = torch.arange(13.0)[1:].reshape(3, 4)
    assert value.data_ptr() % 64
    replace_tensors(model, {"weight": value})
    assert model.weight.data_ptr() % 64 == 0 and torch.equal(model.weight, value)


def test_a_stand_in_stores_one_number() -> None:
    made = shape_of(nn.Parameter(torch.ones(100, 100, dtype=torch.half)))
    assert isinstance(made, nn.Parameter) and made.shape == (100, 100)
    assert made.dtype == torch.half and made.untyped_storage().nbytes() == 2
