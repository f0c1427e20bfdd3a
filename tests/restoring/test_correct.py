"""Corrections: on the inputs they were made from, means and variances are what they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.graph.unit import Consumer
from lbyl.inputs.batches import InputBatches
from lbyl.methods.base import CORRECTIONS
from lbyl.restoring.correct import VARIANCE_LIMITS, Shift, corrected_values
from lbyl.restoring.recalibrate import batch_moments, recalibrate
from lbyl.surgery.indices import kept_indices
from lbyl.torchkit.tensors import tensors
from support import quick
from support.networks import build, consumer_samples, example

KEPT = [0, 2, 4, 5, 6, 9]


def one_unit(
    model: nn.Module, unit: str, x: Tensor, kept: list[int], method: str, correction: str
) -> nn.Module:
    prepared = lbyl.prepare(model, x[:2], data=quick.own_statistics(model, x[:2], x))
    plan = quick.plan_for(prepared.graph, {unit: kept})
    if method == "none" and correction == "none":
        return lbyl.compress(model, x[:2], plan, method="none").model
    return prepared.compress(plan, method=quick.correcting(method, correction)).model


@pytest.mark.parametrize("method", ["echo", "none", "lbyl", "neuron-merging"])
@pytest.mark.parametrize("name", ["chain", "dense"])
def test_mean_goes_into_the_batchnorm_behind(name: str, method: str) -> None:
    model, x = build(name, 2), example(name, 100)
    slim = one_unit(model, "0", x, KEPT, method, "mean")
    before, after = (
        consumer_samples(m, "3", x)[1].mean(0) - m.get_submodule("4").running_mean
        for m in (model, slim)
    )
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    assert torch.equal(slim.get_submodule("4").running_var, model.get_submodule("4").running_var)


@pytest.mark.parametrize("method", ["echo", "none"])
def test_variance_goes_into_the_running_variance(method: str) -> None:
    model, x = build("chain", 2), example("chain", 100)
    slim = one_unit(model, "0", x, KEPT, method, "mean+variance")
    variances = []
    for m in (model, slim):
        _, made = consumer_samples(m, "3", x)
        variances.append(made.var(0, correction=0) / (m[4].running_var + m[4].eps))
    ratio = (slim[4].running_var + slim[4].eps) / (model[4].running_var + model[4].eps)
    inside = (ratio > 1.01 * VARIANCE_LIMITS[0]) & (ratio < 0.99 * VARIANCE_LIMITS[1])
    assert int(inside.sum()) >= 6
    torch.testing.assert_close(variances[1][inside], variances[0][inside], rtol=1e-4, atol=1e-4)
    # Mean and variance together: the normalised outputs are centred as before.
    shift = [consumer_samples(m, "3", x)[1].mean(0) - m[4].running_mean for m in (model, slim)]
    torch.testing.assert_close(shift[1], shift[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["echo", "none", "one-to-one"])
def test_mean_goes_into_the_bias_where_no_batchnorm_follows(method: str) -> None:
    model, x = build("biased", 2), example("biased", 100)
    slim = one_unit(model, "0", x, KEPT, method, "mean")
    means = [consumer_samples(m, "2", x)[1].mean(0) for m in (model, slim)]
    torch.testing.assert_close(means[1], means[0], rtol=0, atol=1e-4)


def test_a_bias_is_made_where_there_was_none() -> None:
    model, x = build("biased", 2), example("biased", 100)
    assert model[6].bias is None
    slim = one_unit(model, "2", x, [0, 1, 2, 3], "echo", "mean")
    assert isinstance(slim[6].bias, nn.Parameter) and model[6].bias is None
    torch.testing.assert_close(slim(x).mean(0), model(x).mean(0), rtol=0, atol=1e-4)


def test_no_correction_leaves_batchnorm_alone() -> None:
    model, x = build("chain", 2), example("chain", 50)
    slim = one_unit(model, "0", x, KEPT, "echo", "none")
    assert torch.equal(slim[4].running_mean, model[4].running_mean)
    assert torch.equal(slim[4].running_var, model[4].running_var)


def test_correction_helps_every_method_of_weights_alone() -> None:
    """On the images themselves, mean and variance bring each method nearer on average."""
    gains = []
    for seed in range(4):
        model, x = build("chain", seed), example("chain", 100)
        measured = lbyl.prepare(model, x, data=x)
        for method in ("none", "lbyl", "neuron-merging"):
            plain = lbyl.compress(model, x, 0.4, method=method)
            corrected = measured.compress(0.4, method=quick.correcting(method, "mean+variance"))
            errors = [(r.model(x) - model(x)).square().mean() for r in (plain, corrected)]
            gains.append(float((errors[1] / errors[0]).detach()))
    assert sum(g < 1 for g in gains) >= 10, gains


def consumer(bias: str | None) -> Consumer:
    return Consumer("layer", "layer.weight", bias, 1, 0, None, "linear", torch.arange(3))


def test_where_nothing_can_take_the_mean_nothing_is_written() -> None:
    shift = Shift(torch.ones(2), torch.ones(2), torch.tensor(0.0), torch.tensor(1.0))
    assert corrected_values(consumer(None), shift, {}, "mean", bias_allowed=False) == {}
    made = corrected_values(consumer(None), shift, {}, "mean", bias_allowed=True)
    assert made["layer.bias"].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_known_correction_runs_and_is_counted(correction: str) -> None:
    model, x = build("chain", 1), example("chain")
    result = quick.compress(model, x, 0.5, method=quick.correcting("echo", correction))
    assert bool(result.model(x).isfinite().all())
    made = result.corrections
    assert made.rewritten == 2
    assert made.mean == (0 if correction == "none" else 2)
    assert made.variance == (1 if correction in ("mean+variance", "recalibrate") else 0)
    assert made.recalibrated == (2 if correction == "recalibrate" else 0)


def test_recalibration_goes_half_the_way_of_a_second_pass() -> None:
    model, x = build("chain", 1), example("chain", 4)
    prepared = lbyl.prepare(model, x, data=64)
    layers = prepared.compress(0.5, method=quick.correcting("echo", "mean+variance"))
    whole = prepared.compress(0.5, method=quick.correcting("echo", "recalibrate"))
    graph = prepared.graph
    indices = kept_indices(graph, layers.plan.kept)
    inputs = prepared.fresh.second_pass
    old, new = batch_moments(model, inputs), batch_moments(layers.model, inputs)
    before, held, now = (tensors(m) for m in (model, layers.model, whole.model))
    for norm in graph.norms:
        keep = indices.get((norm.mean, 0), torch.arange(len(before[norm.mean])))
        moved = before[norm.mean][keep] + new[norm.mean][0] - old[norm.mean][0][keep]
        expected = (held[norm.mean] + moved) / 2
        torch.testing.assert_close(now[norm.mean].double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(held["3.weight"], now["3.weight"])


def test_recalibration_needs_no_data_and_changes_nothing_where_nothing_was_pruned() -> None:
    model, x = build("chain", 1), example("chain", 4)
    slim = lbyl.compress(model, x, 0.0).model
    assert torch.equal(slim(x), model(x))


@pytest.mark.parametrize(("count", "own"), [(40, True), (20, False)])
def test_own_inputs_are_what_is_run_again_where_batchnorm_can_normalise_by_them(
    count: int, own: bool
) -> None:
    model, x, data = build("chain", 1), example("chain", 4), example("chain", count)
    prepared = lbyl.prepare(model, x, data=[data[:7], data[7:]])
    method = quick.correcting("echo", "mean+variance")
    by_layer = prepared.compress({"*": 0.5}, criterion="l2", method=method)
    again = prepared.compress({"*": 0.5}, criterion="l2")
    assert again.corrections.recalibrated == 2 and by_layer.corrections.recalibrated == 0
    inputs = InputBatches([data], 1, True, "own") if own else prepared.fresh.second_pass
    recalibrate(
        model, by_layer.model, again.graph, kept_indices(again.graph, again.plan.kept), inputs
    )
    torch.testing.assert_close(by_layer.model(x), again.model(x))
