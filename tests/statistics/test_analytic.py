"""Statistics from weights alone, against quadrature, and where they must not be told at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.delivery import close
from support.networks import NETWORKS, build, example, randomise


def analytic(model: nn.Module, x: Tensor) -> lbyl.Statistics:
    return lbyl.prepare(model, x, data="analytic").statistics()


def taps_alike(length: float, side: int = 3) -> Tensor:
    """exp(−distance/ℓ) over a kernel, by loops."""
    places = [(r, c) for r in range(side) for c in range(side)]
    rows = [[math.exp(-math.dist(a, b) / length) for b in places] for a in places]
    return torch.tensor(rows, dtype=torch.float64)


def correlation(filters: Tensor, variance: Tensor) -> Tensor:
    """Of what filters (o, i, taps) make; the ℓ under which log variances differ by a constant."""
    taps = [taps_alike(float(length)) for length in torch.logspace(-1.5, 2, 64).double()]
    made = [torch.einsum("oit,ts,pis->op", filters, one, filters) for one in taps]
    usable = (variance > 0) & torch.stack([(c.diagonal() > 0) for c in made]).all(0)
    gaps = [(c.diagonal().log() - variance.log())[usable].var(correction=0) for c in made]
    best = made[int(torch.stack(gaps).argmin()) if int(usable.sum()) > 1 else 32]
    scale = torch.where(best.diagonal() > 0, best.diagonal(), torch.inf).rsqrt()
    return (best * torch.outer(scale, scale)).fill_diagonal_(1.0)


def layer(activation: nn.Module, size: int = 1, seed: int = 3) -> tuple[Any, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 6, size, bias=False), nn.BatchNorm2d(6), activation,
        nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5),
    )  # fmt: skip
    randomise(model, seed).double()
    with torch.no_grad():
        model[1].weight[2] *= -1  # a channel of each sign at least
    return model, torch.randn(2, 3, 9, 9).double()


ACTIVATIONS = {
    "relu": (nn.ReLU(), 1e-5),
    "relu6": (nn.ReLU6(inplace=True), 2e-3),
    "leaky": (nn.LeakyReLU(0.2), 2e-3),
    "gelu": (nn.GELU("tanh"), 1e-6),
    "silu": (nn.SiLU(), 1e-6),
    "softplus": (nn.Softplus(2.0), 1e-6),
    "selu": (nn.SELU(), 2e-3),
    "identity": (nn.Identity(), 1e-9),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mean_and_covariance_are_those_of_gaussians_behind_the_activation(name: str) -> None:
    """E[f(x) f(y)] by a fine sum over the plane; correlations of 1×1 filters are their cosines."""
    function, off = ACTIVATIONS[name]
    model, x = layer(function)
    moments = analytic(model, x).get("3")
    assert moments is not None and moments.taps == 1 and moments.mean.shape == (6, 1)
    gamma, beta = model[1].weight.detach(), model[1].bias.detach()
    unit = F.normalize(model[0].weight.detach().flatten(1), dim=1) * gamma.sign()[:, None]
    z = torch.linspace(-9, 9, 1201, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    density = density / density.sum()
    for i, k in ((0, 0), (1, 1), (2, 2), (0, 2), (1, 3), (4, 5), (2, 3)):
        rho = float(unit[i] @ unit[k])
        first = function(beta[i] + gamma[i].abs() * z)
        across = rho * z[:, None] + max(0.0, 1 - rho**2) ** 0.5 * z
        second = function(beta[k] + gamma[k].abs() * across) @ density
        wanted = (first * second * density).sum() - (first @ density) * (second @ density)
        assert float(moments.covariance[i, k]) == pytest.approx(float(wanted), abs=off)
        assert float(moments.mean[i]) == pytest.approx(float(first @ density), abs=1e-5)


def test_rectified_gaussians_have_their_closed_form() -> None:
    model, x = layer(nn.ReLU())
    with torch.no_grad():
        model[1].weight[0], model[1].bias[0], model[1].bias[1] = 0.0, 0.7, 1e6
        model[1].weight[3], model[1].bias[3] = 0.0, -0.7
        model[0].weight[5] = -model[0].weight[4]
        model[1].weight[5], model[1].bias[5] = model[1].weight[4], -0.2
    moments = analytic(model, x).get("3")
    gamma, beta = model[1].weight.detach().abs(), model[1].bias.detach()
    h = beta / gamma
    above, density = torch.special.ndtr(h), torch.exp(-h.square() / 2) / math.tau**0.5
    mean = beta * above + gamma * density
    square = (beta**2 + gamma**2) * above + beta * gamma * density
    assert moments is not None
    found, variance = moments.mean[:, 0], moments.covariance.diagonal()
    assert found[[0, 3]].tolist() == pytest.approx([0.7, 0.0]) and not bool(variance[[0, 3]].any())
    close(found[[2, 4, 5]], mean[[2, 4, 5]], 1e-12)
    close(variance[[2, 4, 5]], (square - mean**2)[[2, 4, 5]], 1e-12)
    # Far above zero nothing is cut off.
    assert float(variance[1]) == pytest.approx(float(gamma[1] ** 2), rel=1e-9)
    assert bool(moments.covariance.isfinite().all())


@pytest.mark.parametrize("length", [0.3, 1.5, 20.0, None])
def test_correlations_are_those_of_the_length_that_running_variances_tell(
    length: float | None,
) -> None:
    """None: they tell nothing, and a length of about one tap is taken."""
    model, x = layer(nn.Identity(), 3)
    filters = model[0].weight.detach().flatten(2)
    with torch.no_grad():
        filters[5] = 0  # it varies with nothing
        if length is None:
            model[1].running_var[1:] = 0
        else:
            made = torch.einsum("oit,ts,ois->o", filters, taps_alike(length), filters)
            model[1].running_var.copy_(7 * made * torch.linspace(0.9, 1.1, 6))
    wanted = correlation(filters, model[1].running_var)
    moments = analytic(model, x).get("3")
    assert moments is not None
    gamma = model[1].weight.detach()
    close(moments.covariance, wanted * torch.outer(gamma, gamma))
    close(moments.mean[:, 0], model[1].bias.detach())


@pytest.mark.parametrize("length", [0.0, 0.4, 1.5, 6.0, None])
def test_neighbouring_taps_follow_the_variance_behind(length: float | None) -> None:
    model, x = layer(nn.ReLU())
    first = analytic(model, x).get("3")
    assert first is not None
    weight = model[3].weight.detach().flatten(2)
    if length is None:
        model[4].running_var.zero_()
        wanted = torch.ones(9, 9).double()
    else:
        lengths = [0.001, *torch.logspace(-1, 2, 61).tolist()]
        each = [taps_alike(one) for one in lengths]
        variance = torch.stack(
            [torch.einsum("oik,ij,kl,ojl->o", weight, first.covariance, t, weight) for t in each]
        )
        model[4].running_var.copy_(variance[min(range(62), key=lambda i: abs(lengths[i] - length))])
        model[4].running_var[0] *= 1.3
        gaps = (variance.log() - model[4].running_var.log()).square().mean(1)
        wanted = each[int(gaps.argmin())]
    again = analytic(model, x).get("3")
    assert again is not None and again.spatial is not None
    close(again.spatial, wanted, 1e-6)


def test_without_batchnorm_filters_give_mean_and_deviation() -> None:
    model, x = build("dense", 1).double(), example("dense").double()
    moments = analytic(model, x).get("3")
    assert moments is not None and moments.spatial.tolist() == [[1.0]]
    sigma, mean = model[0].weight.detach().norm(dim=1), model[0].bias.detach()
    h = mean / sigma
    density = torch.exp(-h.square() / 2) / math.tau**0.5
    close(moments.mean[:, 0], mean * torch.special.ndtr(h) + sigma * density, 1e-9)
    model, x = build("functional"), example("functional")
    flat = analytic(model, x).get("second")  # no norm behind: all taps are alike
    assert flat is not None and torch.equal(flat.spatial, torch.ones(9, 9).double())


class Branches(nn.Module):
    """Two layers side by side, joined for one reader that also sees the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.b, self.nb = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)
        self.head = nn.Conv2d(14, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        sides = [F.relu(self.na(self.a(x))), F.silu(self.nb(self.b(x)))]
        return self.head(torch.cat([*sides, x], 1))


def test_units_joined_by_concatenation_are_uncorrelated() -> None:
    model, x = randomise(Branches()).double(), torch.randn(2, 3, 4, 4).double()
    moments = analytic(model, x).get("head")
    assert moments is not None and moments.covariance.shape == (14, 14)
    blocks = torch.block_diag(torch.ones(6, 6), torch.ones(5, 5), torch.eye(3)).bool()
    assert torch.equal(moments.covariance != 0, blocks)
    made = moments.covariance.diagonal()
    close(made[11:], made[:11].mean().expand(3))  # what no unit makes has the mean variance
    assert bool((moments.mean[11:] == 0).all())
    slim = lbyl.compress(model, x, 0.4, method="moments").model
    close(slim.head.weight[:, -3:].detach(), model.head.weight[:, 11:].detach())


def several(*path: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), *path, nn.Conv2d(8, 4, 1))


UNKNOWN = {
    "another layer between": several(nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()),
    "two activations": several(nn.ReLU(), nn.Tanh()),
    "the norm comes second": nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
    ),
    "which of two slopes": nn.Sequential(*several(nn.LeakyReLU(0.1)), nn.LeakyReLU(0.3)),
    "a norm by groups": NETWORKS["group-normed"](),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_weights_do_not_tell_gets_no_moments(name: str) -> None:
    model, x = randomise(UNKNOWN[name]), torch.randn(2, 3, 8, 8)
    statistics = analytic(model, x)
    assert not statistics.moments and statistics.source == "analytic"
    found, plain = (lbyl.compress(model, x, 0.5, method=m).model(x) for m in ("moments", "none"))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    "between", [nn.MaxPool2d(2), nn.Dropout(), nn.AdaptiveAvgPool2d(4), nn.Identity()]
)
def test_pooling_and_the_like_leave_moments_as_they_are(between: nn.Module) -> None:
    x = torch.randn(2, 3, 8, 8)
    plain, found = (
        analytic(randomise(several(nn.ReLU(), *more), 2), x).moments.popitem()[1]
        for more in ((), (between,))
    )
    assert torch.equal(plain.covariance, found.covariance) and torch.equal(plain.mean, found.mean)


@pytest.mark.parametrize("name", NETWORKS)
def test_covariances_are_positive_semidefinite_and_take_no_run_of_the_network(name: str) -> None:
    model, x = build(name), example(name)
    if name == "chain":
        with torch.no_grad():
            model[1].weight[:3] = 0
            model[1].running_var[2:5] = 0
            model[0].weight[6] = 0
    prepared = lbyl.prepare(model, x, data="analytic")
    ran: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: ran.append(m))
    for moments in prepared.statistics().moments.values():
        assert bool(moments.mean.isfinite().all() and moments.covariance.isfinite().all())
        lowest = torch.linalg.eigvalsh(moments.covariance)[0]
        assert float(lowest) >= -1e-6 * float(moments.covariance.diagonal().sum())
    assert not ran
