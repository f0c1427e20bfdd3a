"""What holds for every method: identities, exact cases, and numbers near zero."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from support.networks import NETWORKS, build, example

METHODS: dict[str, Any] = {
    **{name: lbyl.methods.resolve(name) for name in lbyl.methods.names()},
    "lbyl released": lbyl.methods.LBYL(variant="released"),
    "neuron-merging released": lbyl.methods.NeuronMerging(variant="released"),
}
HALF = lbyl.Plan({"0": torch.arange(5)}, {"0": 10})


def prepared(model: nn.Module, x: Tensor) -> lbyl.Prepared:
    """With statistics of few images for whatever method asks for some."""
    statistics = lbyl.prepare(model, x, data=16).statistics()
    return lbyl.prepare(model, x, data=statistics)


FAST = ("flattened", "basic")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]


@pytest.mark.parametrize("name", EACH)
def test_every_method_and_criterion_gives_a_working_network(name: str) -> None:
    model, x = build(name), example(name, 3)
    on_these = prepared(model, x)
    wanted = model(x)
    for number, method in enumerate(METHODS.values()):
        same = on_these.compress(0.0, method=method)
        torch.testing.assert_close(same.model(x), wanted, rtol=0, atol=1e-5)
        assert same.after == same.before
        criteria: list[str | None] = [None]
        if not method.chooses:
            every = lbyl.criteria.names()
            criteria = list(every) if name not in FAST else [every[number % len(every)]]
        for criterion in criteria:
            result = on_these.compress(0.5, method=method, criterion=criterion)
            found = result.model(x)
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            assert bool(found.isfinite().all()), (method, criterion)
            assert result.after.parameters < result.before.parameters


# ---------------------------------------------------------------------- exact reconstruction

# Methods that can express an equal filter, and those that can express a scaled one.
EQUAL = {
    "theorem": lbyl.methods.LBYL(1e-5, 1e-12),
    "released": lbyl.methods.LBYL(0.0, 1e-12, "released"),
    "merging": lbyl.methods.NeuronMerging(),
    "merging released": lbyl.methods.NeuronMerging(variant="released"),
    "one-to-one": lbyl.methods.OneToOne(),
    "fold": lbyl.methods.Fold(),
    "echo": lbyl.methods.Echo(ridge=1e-9),
}
SCALED = ("theorem", "merging", "echo")
SAME_NORM = ("theorem", "released", "merging", "merging released")


def duplicated(seed: int, size: float = 1.0, gain: float = 1.0, same_norm: bool = False) -> Any:
    """Filters 5…9 become `size` times 0…4, their channels `gain` times.

    Mean and variance follow the filter as they would on data, and γ and β give the gain; with
    `same_norm` variance and γ stay, so that the channels are `size` times the others.
    """
    model: Any = build("chain", seed).double()
    conv, norm = model[0], model[1]
    variance = norm.running_var[:5] + norm.eps
    with torch.no_grad():
        conv.weight[5:] = size * conv.weight[:5]
        norm.running_mean[5:] = size * norm.running_mean[:5]
        norm.running_var[5:] = variance * (1 if same_norm else size**2) - norm.eps
        norm.weight[5:] = (1 if same_norm else gain) * norm.weight[:5]
        norm.bias[5:] = (size if same_norm else gain) * norm.bias[:5]
    return model


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_and_scaled_filters_are_restored_exactly(seed: int) -> None:
    x = example("chain", 4).double()
    for names, given in (
        (tuple(EQUAL), {}),
        (SCALED, {"size": 0.6, "gain": 2.3}),
        (SAME_NORM, {"size": 2.7, "same_norm": True}),
    ):
        model = duplicated(seed, **given)  # type: ignore[arg-type]
        on_these, wanted = prepared(model, x), model(x).detach()
        for name in names:
            found = on_these.compress(HALF, method=EQUAL[name]).model(x)
            off = 1e-3 if name == "echo" else 1e-5  # a ridge, and norms by the batch
            torch.testing.assert_close(found, wanted, rtol=off, atol=off, msg=name)
        left_out = on_these.compress(HALF, method="none").model(x)
        assert float((left_out - wanted).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.GELU(), nn.SiLU()])
def test_equal_channels_are_restored_whatever_the_activation(activation: nn.Module) -> None:
    model, x = duplicated(2), example("chain", 4).double()
    model[2] = model[5] = activation
    method = lbyl.methods.AnalyticMoments(ridge=1e-6)
    found, left_out = (
        lbyl.compress(model, x, HALF, method=each).model(x) for each in (method, "none")
    )
    wanted = model(x)
    error, without = ((y - wanted).norm() / wanted.norm() for y in (found, left_out))
    # The series stops at its order, so that equal channels are not wholly so.
    assert float(error) < 0.02 < 0.1 < float(without)


def test_a_pruned_filter_that_is_a_mixture_needs_many_kept_ones() -> None:
    """The reason for the paper: no single filter stands in for a sum of two (linear case)."""
    model: Any = build("chain", 4).double()
    model[2] = nn.Identity()
    conv, norm = model[0], model[1]
    with torch.no_grad():
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        row = scale[0] * conv.weight[0] + scale[1] * conv.weight[1]
        shift = norm.bias - scale * norm.running_mean
        conv.weight[9] = row / scale[9]
        norm.bias[9] = shift[0] + shift[1] + scale[9] * norm.running_mean[9]
    x = example("chain", 4).double()
    plan, on_these = lbyl.Plan({"0": torch.arange(9)}, {"0": 10}), lbyl.prepare(model, x)
    many = on_these.compress(plan, method=lbyl.methods.LBYL(1.0, 1e-12)).model(x)
    one = on_these.compress(plan, method="neuron-merging").model(x)
    torch.testing.assert_close(many, model(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(one, model(x), atol=1e-2)


# ------------------------------------------------------------------------ γ and σ near zero


def assert_finite(result: lbyl.Result, x: Tensor) -> None:
    for name, tensor in result.model.state_dict().items():
        assert bool(tensor.isfinite().all()), name
    assert bool(result.model(x).isfinite().all())
    for row in result.rows:
        assert row.error is None or math.isfinite(row.error)


@pytest.mark.parametrize("value", [0.0, -1e-12, 1e-7])
def test_a_vanishing_gamma_gives_finite_moderate_weights(value: float) -> None:
    model: Any = build("chain", 1)
    x = example("chain", 3)
    with torch.no_grad():
        model[1].weight[[0, 1, 7, 8]] = value  # two of them kept, two pruned
        model[1].running_var[[1, 2, 8, 9]] = 0.0
    before, on_these = max(float(model[3].weight.abs().max()), 1.0), prepared(model, x)
    for method in METHODS.values():
        result = on_these.compress(HALF, method=method)
        assert_finite(result, x)
        assert float(result.model[3].weight.abs().max()) < 1e3 * before


def test_pruning_filters_that_are_off_does_not_disturb_the_others() -> None:
    """γ = 0 and β ≤ 0: the channel is dead behind its ReLU, and going it changes nothing."""
    model: Any = build("chain", 6).double()
    x = example("chain", 3).double()
    with torch.no_grad():
        model[1].weight[5:] = 0.0
        model[1].bias[5:] = -0.1
    on_these = prepared(model, x)
    for name in ("none", "lbyl", "neuron-merging", "echo", "moments"):
        method = replace(METHODS[name], correction="none")
        found = on_these.compress(HALF, method=method).model(x)
        torch.testing.assert_close(found, model(x), rtol=1e-9, atol=1e-9, msg=name)


def test_zero_weights_give_finite_outputs() -> None:
    model: Any = build("dense", 1)
    x = example("dense", 3)
    with torch.no_grad():
        model[0].weight[:12].zero_()
        model[0].bias[:12].zero_()
    on_these = prepared(model, x)
    for method in METHODS.values():
        chosen_by = None if method.chooses else "random-3"
        result = on_these.compress(0.5, method=method, criterion=chosen_by)
        assert bool(result.model(x).isfinite().all())
