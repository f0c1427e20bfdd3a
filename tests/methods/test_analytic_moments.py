"""`moments`: echo's regression on covariances that the weights give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lbyl
from lbyl import api
from lbyl.planning.plan import Plan
from lbyl.statistics.analytic import analytic_statistics
from support import quick
from support.networks import NETWORKS, build, example, randomise

ACTIVATIONS = [nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.SELU]


def small(activation: type[nn.Module]) -> nn.Module:
    return randomise(
        nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            activation(),
            nn.Conv2d(12, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            activation(),
            nn.Conv2d(8, 4, 1),
        )
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_duplicated_channels_are_restored_whatever_the_activation(
    activation: type[nn.Module],
) -> None:
    model, x = small(activation), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        own = [model[0].weight, model[1].weight, model[1].bias]
        for tensor in [*own, model[1].running_mean, model[1].running_var]:
            tensor[6:] = tensor[:6]
    graph = lbyl.trace(model, x)
    assert set(analytic_statistics(model, graph).moments) == {"3", "6"}
    plan = Plan({"0": torch.arange(6)}, {"0": 12})
    method = lbyl.methods.AnalyticMoments(ridge=1e-6)
    found = lbyl.compress(model, x, plan, method=method).model(x)
    left_out = lbyl.compress(model, x, plan, method="none").model(x)
    wanted = model(x).detach()
    error, without = ((y.detach() - wanted).norm() / wanted.norm() for y in (found, left_out))
    # The series stops at its order, so that equal channels are not wholly so.
    assert float(error) < 0.02 < 0.1 < float(without)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_are_the_regression_on_the_analytic_covariance(
    activation: type[nn.Module],
) -> None:
    model, x = small(activation), torch.randn(2, 3, 8, 8)
    graph = lbyl.trace(model, x)
    moments = analytic_statistics(model, graph).get("3")
    assert moments is not None
    kept, gone = torch.arange(0, 12, 2), torch.arange(1, 12, 2)
    plan = Plan({"0": kept}, {"0": 12})
    slim = lbyl.compress(model, x, plan, method="moments").model
    c = moments.covariance
    inner = c[kept][:, kept]
    inner = inner + 0.01 * inner.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    rows = c[gone][:, kept] @ inner.inverse()
    old = model[3].weight.detach().double()
    wanted = old[:, kept] + torch.einsum("ojkl,jt->otkl", old[:, gone], rows)
    torch.testing.assert_close(slim[3].weight.double(), wanted, rtol=1e-4, atol=1e-5)
    # The mean moves by what the weights say, into the norm behind.
    mean = moments.mean[:, 0]
    moved = (wanted.sum((2, 3)) @ mean[kept]) - (old.sum((2, 3)) @ mean)
    change = (slim[4].running_mean - model[4].running_mean).double()
    torch.testing.assert_close(change, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", ["none", "lbyl", "neuron-merging", "moments", "fold"])
def test_corrections_leave_an_unpruned_network_alone(name: str, method: str) -> None:
    model, x = build(name), example(name)
    graph = lbyl.trace(model, x)
    statistics = analytic_statistics(model, graph)
    correcting = quick.correcting(method, "mean+variance")
    result = lbyl.compress(model, x, 0.0, method=correcting, data=statistics)
    state = model.state_dict()
    assert result.model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in result.model.state_dict().items())


def test_no_image_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("statistics were collected")

    monkeypatch.setattr(api, "collect", refuse)
    model, x = build("chain"), example("chain")
    result = lbyl.compress(model, x, 0.5, method="moments")
    assert result.method["correction"] == "mean+variance" and result.data == "analytic"
    assert bool(result.model(x).isfinite().all())
    with pytest.raises(AssertionError, match="collected"):  # a user's own images still count
        lbyl.compress(model, x, 0.5, method="moments", data=x)


def test_given_statistics_serve_every_method_and_cost_no_time_again() -> None:
    model, x = build("chain"), example("chain")
    graph = lbyl.trace(model, x)
    statistics = analytic_statistics(model, graph)
    for method in ("none", "lbyl", "neuron-merging", "moments"):
        correcting = quick.correcting(method, "mean+variance")
        result = lbyl.compress(model, x, 0.5, method=correcting, data=statistics)
        assert not torch.equal(
            result.model[4].running_var, model[4].running_var[result.plan.kept["3"]]
        )
        assert "collect" not in result.seconds
