"""Repairs: on the images they were made from, means and variances are what they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.plan import Plan
from lbyl.repair import REPAIRS, VARIANCE_LIMITS, Shift, repaired
from lbyl.statistics.recalibrate import batch_moments
from lbyl.statistics.sources import Unseen
from lbyl.surgery import surviving_indices, tensors
from lbyl.unit import Consumer
from networks import build, consumer_samples, example

KEPT = [0, 2, 4, 5, 6, 9]


def one_unit(
    model: nn.Module, unit: str, x: Tensor, kept: list[int], **options: object
) -> nn.Module:
    graph = lbyl.trace(model, x[:2])
    plan = Plan({unit: torch.tensor(kept)}, {unit: graph[unit].channels})
    return lbyl.compress(model, x[:2], plan=plan, graph=graph, calibration=x, **options).model  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["echo", "none", "lbyl", "neuron-merging"])
@pytest.mark.parametrize("name", ["chain", "dense"])
def test_mean_goes_into_the_batchnorm_behind(name: str, method: str) -> None:
    model, x = build(name, 2), example(name, 100)
    slim = one_unit(model, "0", x, KEPT, method=method, repair="mean")
    before, after = (
        consumer_samples(m, "3", x)[1].mean(0) - m.get_submodule("4").running_mean
        for m in (model, slim)
    )
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    assert torch.equal(slim.get_submodule("4").running_var, model.get_submodule("4").running_var)


@pytest.mark.parametrize("method", ["echo", "none"])
def test_variance_goes_into_the_running_variance(method: str) -> None:
    model, x = build("chain", 2), example("chain", 100)
    slim = one_unit(model, "0", x, KEPT, method=method, repair="mean+variance")
    spreads = []
    for m in (model, slim):
        _, made = consumer_samples(m, "3", x)
        spreads.append(made.var(0, correction=0) / (m[4].running_var + m[4].eps))
    ratio = (slim[4].running_var + slim[4].eps) / (model[4].running_var + model[4].eps)
    inside = (ratio > 1.01 * VARIANCE_LIMITS[0]) & (ratio < 0.99 * VARIANCE_LIMITS[1])
    assert int(inside.sum()) >= 6
    torch.testing.assert_close(spreads[1][inside], spreads[0][inside], rtol=1e-4, atol=1e-4)
    # Mean and variance together: the normalised outputs are centred as before.
    shift = [consumer_samples(m, "3", x)[1].mean(0) - m[4].running_mean for m in (model, slim)]
    torch.testing.assert_close(shift[1], shift[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["echo", "none", "one-to-one"])
def test_mean_goes_into_the_bias_where_no_batchnorm_follows(method: str) -> None:
    model, x = build("biased", 2), example("biased", 100)
    slim = one_unit(model, "0", x, KEPT, method=method, repair="mean")
    means = [consumer_samples(m, "2", x)[1].mean(0) for m in (model, slim)]
    torch.testing.assert_close(means[1], means[0], rtol=0, atol=1e-4)


def test_a_bias_is_made_where_there_was_none() -> None:
    model, x = build("biased", 2), example("biased", 100)
    assert model[6].bias is None
    slim = one_unit(model, "2", x, [0, 1, 2, 3], repair="mean")
    assert isinstance(slim[6].bias, nn.Parameter) and model[6].bias is None
    torch.testing.assert_close(slim(x).mean(0), model(x).mean(0), rtol=0, atol=1e-4)


def test_no_repair_leaves_batchnorm_alone() -> None:
    model, x = build("chain", 2), example("chain", 50)
    slim = one_unit(model, "0", x, KEPT, repair="none")
    assert torch.equal(slim[4].running_mean, model[4].running_mean)
    assert torch.equal(slim[4].running_var, model[4].running_var)


def test_repair_helps_every_method_of_weights_alone() -> None:
    """On the images themselves, mean and variance bring each method nearer on average."""
    gains = []
    for seed in range(4):
        model, x = build("chain", seed), example("chain", 100)
        graph = lbyl.trace(model, x)
        for method in ("none", "lbyl", "neuron-merging"):
            options = {"method": method, "graph": graph, "calibration": x}
            errors = []
            for repair in ("none", "mean+variance"):
                slim = lbyl.compress(model, x, 0.4, repair=repair, **options).model
                errors.append((slim(x) - model(x)).square().mean())
            gains.append(float((errors[1] / errors[0]).detach()))
    assert sum(g < 1 for g in gains) >= 10, gains


def consumer(bias: str | None) -> Consumer:
    return Consumer("layer", "layer.weight", bias, 1, 0, None, "linear", torch.arange(3))


def test_where_nothing_can_take_the_mean_nothing_is_written() -> None:
    shift = Shift(torch.ones(2), torch.ones(2))
    assert repaired(consumer(None), shift, {}, "mean", bias_allowed=False) == {}
    made = repaired(consumer(None), shift, {}, "mean", bias_allowed=True)
    assert made["layer.bias"].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("repair", REPAIRS)
def test_every_known_repair_runs(repair: str) -> None:
    model, x = build("chain", 1), example("chain")
    result = lbyl.compress(model, x, 0.5, repair=repair, images=32)
    assert result.repair == repair and bool(result.model(x).isfinite().all())


def test_network_repair_goes_half_the_way_of_a_second_pass() -> None:
    model, x = build("chain", 1), example("chain", 4)
    graph = lbyl.trace(model, x)
    statistics = lbyl.collect(model, x, graph=graph, images=64)
    given = {"graph": graph, "statistics": statistics}
    layers = lbyl.compress(model, x, 0.5, repair="mean+variance", **given)
    whole = lbyl.compress(model, x, 0.5, repair="network", **given)
    indices = surviving_indices(graph, layers.plan.kept)
    passes = Unseen(model, x, 0).few
    old, new = batch_moments(model, passes), batch_moments(layers.model, passes)
    before, held, found = (tensors(m) for m in (model, layers.model, whole.model))
    for norm in graph.norms:
        keep = indices.get((norm.mean, 0), torch.arange(len(before[norm.mean])))
        moved = before[norm.mean][keep] + new[norm.mean][0] - old[norm.mean][0][keep]
        expected = (held[norm.mean] + moved) / 2
        torch.testing.assert_close(found[norm.mean].double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(held["3.weight"], found["3.weight"])


def test_network_repair_needs_no_data_and_changes_nothing_where_nothing_went() -> None:
    model, x = build("chain", 1), example("chain", 4)
    slim = lbyl.compress(model, x, 0.0, repair="network").model
    assert torch.equal(slim(x), model(x))
    # With a user's own inputs there is nothing procedural to run: repaired by layer, as before.
    data = example("chain", 40)
    by_layer, network = (
        lbyl.compress(model, x, 0.5, calibration=data, repair=r).model(x)
        for r in ("mean+variance", "network")
    )
    assert torch.equal(by_layer, network)
