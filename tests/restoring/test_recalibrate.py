"""Moments at BatchNorm over several batches, and where running statistics go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.inputs.batches import InputBatches
from lbyl.restoring.recalibrate import batch_moments, recalibrate
from lbyl.torchkit.fallbacks import noting


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    with torch.no_grad():
        model[1].running_mean.copy_(torch.randn(4))
        model[1].running_var.copy_(torch.rand(4) + 0.5)
    return model.double().eval()


BATCHES = [
    torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(n)).double() for n in (3, 5)
]


def inputs(by_batch: bool) -> InputBatches:
    return InputBatches([(x,) for x in BATCHES], 2, by_batch, "own")


def entering(model: nn.Sequential) -> Tensor:
    with torch.no_grad():
        return torch.cat([model[0](x) for x in BATCHES])


@pytest.mark.parametrize("by_batch", [True, False])
def test_moments_are_those_of_all_batches_together(by_batch: bool) -> None:
    model = network()
    mean, variance = batch_moments(model, inputs(by_batch))["1.running_mean"]
    values = entering(model)
    torch.testing.assert_close(mean, values.mean((0, 2, 3)))
    torch.testing.assert_close(variance, values.var((0, 2, 3), correction=0))


@pytest.mark.parametrize("step", [0.0, 0.25, 1.0])
def test_running_statistics_go_the_step_towards_what_the_batches_show(step: float) -> None:
    model = network()
    graph = lbyl.trace(model, BATCHES[0])
    slim = copy.deepcopy(model)
    with torch.no_grad():
        slim[0].weight *= 1.3
        slim[0].bias += 0.4
        slim[1].running_mean += 0.1
        slim[1].running_var *= 1.2
    held_mean, held_var = slim[1].running_mean.clone(), slim[1].running_var.clone()
    assert recalibrate(model, slim, graph, {}, inputs(False), step, limits=(0.1, 10.0)) == 1
    old, new, eps = entering(model), entering(slim), model[1].eps
    shift = new.mean((0, 2, 3)) - old.mean((0, 2, 3))
    ratio = new.var((0, 2, 3), correction=0) / old.var((0, 2, 3), correction=0)
    target = model[1].running_mean + shift
    expected = held_mean + step * (target - held_mean)
    torch.testing.assert_close(slim[1].running_mean, expected)
    there = (model[1].running_var + eps) * ratio
    here = held_var + eps
    expected = here * (there / here) ** step - eps
    torch.testing.assert_close(slim[1].running_var, expected)


def test_variances_move_within_limits_and_means_of_kept_channels_alone() -> None:
    model = network()
    graph = lbyl.trace(model, BATCHES[0])
    kept = torch.tensor([0, 3])
    slim = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 1))
    slim = slim.double().eval()
    with torch.no_grad():
        slim[0].weight.copy_(100 * model[0].weight[kept])
        slim[0].bias.copy_(model[0].bias[kept])
        for name in ("running_mean", "running_var"):
            getattr(slim[1], name).copy_(getattr(model[1], name)[kept])
    indices = {("1.running_mean", 0): kept}
    assert recalibrate(model, slim, graph, indices, inputs(False), 1.0, (0.5, 2.0)) == 1
    eps = model[1].eps
    torch.testing.assert_close(slim[1].running_var, 2 * (model[1].running_var[kept] + eps) - eps)
    shift = entering(slim).mean((0, 2, 3)) - entering(model).mean((0, 2, 3))[kept]
    torch.testing.assert_close(slim[1].running_mean, model[1].running_mean[kept] + shift)


def test_what_is_not_finite_moves_nothing() -> None:
    model = network()
    graph = lbyl.trace(model, BATCHES[0])
    slim = copy.deepcopy(model)
    damaged = {"1.running_mean": (torch.full((4,), torch.inf).double(), torch.ones(4).double())}
    with noting() as notes:
        assert recalibrate(model, slim, graph, {}, inputs(False), before=damaged) == 0
    assert [note.partition(":")[0] for note in notes] == ["1"]
    assert torch.equal(slim[1].running_mean, model[1].running_mean)
    assert recalibrate(model, slim, graph, {}, inputs(False), before={}) == 0


def two_norms() -> nn.Sequential:
    model = nn.Sequential(network(), nn.BatchNorm2d(3, eps=0.3)).double().eval()
    with torch.no_grad():
        model[1].running_var.uniform_(0.5, 2.0)
    return model


def test_norms_of_different_sizes_are_moved_each_by_its_own() -> None:
    model = two_norms()
    graph = lbyl.trace(model, BATCHES[0])
    slim = copy.deepcopy(model)
    with torch.no_grad():
        slim[0][0].bias += 0.4
        slim[0][3].weight *= 1.1
    before = {n: m.clone() for n, m in slim.state_dict().items()}
    alone = {}
    for name in ("0.1.running_mean", "1.running_mean"):
        one = copy.deepcopy(slim)
        known = batch_moments(model, inputs(False))
        assert recalibrate(model, one, graph, {}, inputs(False), before={name: known[name]}) == 1
        alone[name] = one.state_dict()
    assert recalibrate(model, slim, graph, {}, inputs(False)) == 2
    for module, name in (("0.1", "0.1.running_mean"), ("1", "1.running_mean")):
        for part in ("running_mean", "running_var"):
            found = slim.state_dict()[f"{module}.{part}"]
            assert torch.equal(found, alone[name][f"{module}.{part}"])
    assert not torch.equal(slim[1].running_mean, before["1.running_mean"])


def test_a_norm_that_is_not_finite_leaves_the_others_their_turn() -> None:
    model = two_norms()
    graph = lbyl.trace(model, BATCHES[0])
    slim = copy.deepcopy(model)
    with torch.no_grad():
        slim[0][0].bias += 0.4
    known = batch_moments(model, inputs(False))
    mean, variance = known["0.1.running_mean"]
    known["0.1.running_mean"] = mean * torch.nan, variance
    assert recalibrate(model, slim, graph, {}, inputs(False), before=known) == 1
    assert torch.equal(slim[0][1].running_mean, model[0][1].running_mean)
    assert not torch.equal(slim[1].running_mean, model[1].running_mean)
