"""`echo` against least squares on activations collected by hooks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lbyl
from lbyl.inputs.batches import procedural
from lbyl.planning.plan import Plan
from lbyl.statistics.collect import collect_moments
from support import quick
from support.networks import build, consumer_samples, example

# network, unit, the layer that reads it, kept channels
CASES = [
    ("chain", "0", "3", [0, 2, 5, 6, 9]),
    ("chain", "3", "8", [1, 2, 7]),
    ("biased", "0", "2", [0, 1, 4, 8]),
    ("basic", "conv1", "conv2", [3, 4, 5, 6, 7]),
    ("bottleneck", "conv1", "conv2", [0, 3, 4, 7]),
    ("bottleneck", "conv2", "conv3", [1, 2, 3, 8]),
    ("flattened", "0", "5", [0, 1, 6]),
    ("pooled", "0", "5", [2, 3, 4, 8]),
    ("dense", "0", "3", [0, 1, 2, 10, 11, 15]),
    ("dense", "3", "6", [0, 4, 5]),
]


def fitted(weight: Tensor, samples: Tensor, stays: Tensor, ridge: float) -> Tensor:
    """V_P plus the least-squares fit of what the pruned inputs brought, by the kept ones.

    The ridge is rows of √ε · I below the samples, ε relative to the kept inputs' mean variance.
    """
    centred = (samples - samples.mean(0)) / len(samples) ** 0.5
    strength = ridge * centred[:, stays].square().sum(0).mean()
    below = strength.sqrt() * torch.eye(int(stays.sum()), dtype=torch.float64)
    brought = centred[:, ~stays] @ weight[:, ~stays].T
    right = torch.cat([brought, brought.new_zeros(len(below), brought.shape[1])])
    left = torch.cat([centred[:, stays], below])
    return weight[:, stays] + torch.linalg.lstsq(left, right, driver="gelsd").solution.T


def compressed(
    name: str, unit: str, kept: list[int], x: Tensor, method: lbyl.methods.Echo
) -> tuple[torch.nn.Module, lbyl.Result]:
    model = build(name, 11).double()
    data = quick.own_statistics(model, x[:2], x, taps=method.taps)
    prepared = lbyl.prepare(model, x[:2], data=data)
    result = prepared.compress(quick.plan_for(prepared.graph, {unit: kept}), method=method)
    return model, result


@pytest.mark.parametrize(("name", "unit", "reader", "kept"), CASES)
@pytest.mark.parametrize("ridge", [0.01, 1e-5])
def test_weights_equal_least_squares_on_collected_activations(
    name: str, unit: str, reader: str, kept: list[int], ridge: float
) -> None:
    x = example(name, 200).double()
    method = lbyl.methods.Echo(ridge=ridge, correction="mean")
    model, result = compressed(name, unit, kept, x, method=method)
    samples, _ = consumer_samples(model, reader, x)
    weight = model.get_submodule(reader).weight.detach()
    found = result.model.get_submodule(reader).weight.detach()
    consumer, start = result.graph.consumers[reader], result.graph[unit].start
    columns = torch.isin(consumer.channel - start, torch.tensor(kept))
    stays = columns.repeat_interleave(samples.shape[1] // len(columns))
    wanted = fitted(weight.flatten(1), samples, stays, ridge)
    assert (found.flatten(1) - wanted).norm() <= 1e-6 * wanted.norm()


def test_procedural_images_with_batch_statistics_give_the_same_fit() -> None:
    """Without own data: the network in training mode on the same images, by hand."""
    model, x = build("chain", 12).double(), example("chain").double()
    graph = lbyl.trace(model, x)
    kept = [0, 1, 2, 5]
    plan = Plan({"0": torch.tensor(kept)}, {"0": 10})
    passes = procedural(model, x, count=64, seed=5)
    measured = collect_moments(model, graph, passes, seed=5)
    result = lbyl.compress(model, x, plan, data=measured)
    images = next(iter(passes.batches))
    twin = build("chain", 12).double().train()
    samples, _ = consumer_samples(twin, "3", images)
    stays = torch.isin(torch.arange(10), torch.tensor(kept)).repeat_interleave(9)
    wanted = fitted(model[3].weight.detach().flatten(1), samples, stays, 0.01)
    found = result.model[3].weight.detach().flatten(1)
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@given(st.integers(0, 1000))
def test_it_beats_leaving_channels_out_on_the_images_it_saw(seed: int) -> None:
    model, x = build("chain", seed), example("chain", 64)
    errors = {}
    for method, data in (("none", None), (lbyl.methods.Echo(correction="none"), x)):
        plan = Plan({"0": torch.arange(6)}, {"0": 10})
        result = lbyl.compress(model, x, plan, method=method, data=data, include="0")
        _, before = consumer_samples(model, "3", x)
        _, after = consumer_samples(result.model, "3", x)
        errors[result.method["name"]] = float((before - after).var(0).sum())
    assert errors["echo"] < errors["none"]


@pytest.mark.parametrize("taps", ["auto", "channels"])
def test_taps_by_name(taps: str) -> None:
    x = example("chain", 64).double()
    model, result = compressed(
        "chain", "0", [0, 1, 2, 3, 4, 5], x, method=lbyl.methods.Echo(taps=taps)
    )
    assert bool(result.model(x).isfinite().all())
    if taps == "channels":  # every tap of the reader is served by one matrix S
        gained = result.model[3].weight.detach() - model[3].weight.detach()[:, :6]
        gone = model[3].weight.detach()[:, 6:]  # (8, 4, 3, 3)
        rows = gone.permute(0, 2, 3, 1).reshape(-1, 4)
        wanted = gained.permute(0, 2, 3, 1).reshape(-1, 6)
        s = torch.linalg.lstsq(rows, wanted).solution
        torch.testing.assert_close(rows @ s, wanted, rtol=1e-8, atol=1e-8)


def test_unknown_taps_are_refused() -> None:
    with pytest.raises(lbyl.LbylError, match="'auto' or 'channels'"):
        lbyl.methods.Echo(taps="all")


def test_negative_ridge_is_refused() -> None:
    with pytest.raises(lbyl.LbylError, match="ridge"):
        lbyl.methods.Echo(ridge=-0.1)
