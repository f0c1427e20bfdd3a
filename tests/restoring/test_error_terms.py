"""RE, BE and ‖s‖ of a result against the paper's formulas, filter by filter, and WARE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lbyl
from lbyl.methods import Delivery, Method
from lbyl.methods.base import identity_rows
from lbyl.rivals.errors import layer_errors
from support.by_hand import sampled, statistics_of
from support.networks import build, example


@dataclass(frozen=True)
class Delivering(Method):
    """Delivers these rows for what is pruned."""

    rows: Any = None
    name = "delivering"  # type: ignore[assignment]

    def deliver(self, weights: Any, kept: Tensor, statistics: Any) -> Delivery:
        channels = len(weights.filters)
        matrix = identity_rows(channels, kept, weights.filters)
        matrix[[i for i in range(channels) if i not in kept.tolist()]] = self.rows
        return Delivery(matrix)


KEPT, GONE = [0, 1, 4, 8], [2, 3, 5, 6, 7, 9]


@dataclass(frozen=True)
class Keeping(lbyl.criteria.Criterion):
    """Keeps these channels."""

    kept: tuple[int, ...] = ()
    name = "keeping"  # type: ignore[assignment]

    def select(self, weights: Any, count: int, statistics: Any = None) -> Tensor:
        return torch.tensor(self.kept)


def row_of(model: Any, name: str, kept: list[int], method: Method) -> Any:
    """The errors of the first unit, of which these channels are kept."""
    prepared = lbyl.prepare(model, example(name).to(model[0].weight), include="0", data=8)
    ratio = 1 - len(kept) / prepared.graph["0"].channels
    options: dict[str, Any] = {"methods": (method,), "criterion": Keeping(tuple(kept))}
    (row,) = layer_errors(prepared, (ratio,), **options).rows
    return row


@pytest.mark.parametrize("off", [False, True])
def test_behind_batchnorm(off: bool) -> None:
    """Filters that γ switched off have no residual of their own."""
    model, s = build("chain", 3).double(), torch.randn(6, 4).double()
    with torch.no_grad():
        model[1].weight[GONE[:2]] = 0 if off else model[1].weight[GONE[:2]]
    filters, norm = model[0].weight.detach().flatten(1), model[1]
    gamma, beta = norm.weight.detach(), norm.bias.detach()
    sigma, mean = (norm.running_var + norm.eps).sqrt(), norm.running_mean
    p = gamma * mean / sigma - beta
    residuals, biases = [], []
    for j, row in zip(GONE, s):
        biases.append(abs(float(row @ p[KEPT] - p[j])))
        if gamma[j] != 0:
            kappa = sigma[j] * gamma[KEPT] / (gamma[j] * sigma[KEPT])
            residuals.append(float((filters[j] - (row * kappa) @ filters[KEPT]).norm()))
    found = row_of(model, "chain", KEPT, Delivering(rows=s))
    assert len(residuals) == (4 if off else 6)
    assert found.residual == pytest.approx(sum(residuals) / len(residuals))
    assert found.bias == pytest.approx(sum(biases) / 6)
    assert found.norm == pytest.approx(float(s.norm(dim=1).mean()))


def test_without_batchnorm_the_bias_is_part_of_the_filter() -> None:
    model, s = build("dense", 2).double(), torch.randn(7, 9).double()
    rows = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach()
    found = row_of(model, "dense", [*range(9)], Delivering(rows=s))
    wanted = float((rows[9:] - s @ rows[:9]).norm(dim=1).mean())
    assert (found.residual, found.bias) == (pytest.approx(wanted), 0.0)


def test_the_theorem_trades_the_errors_as_its_weights_say() -> None:
    """A larger λ₁ buys a smaller BE, a larger λ₂ a smaller ‖s‖, each at the cost of RE."""
    model = build("chain", 3)
    weights = ((0, 1e-6), (100, 1e-6), (0, 10))
    plain, biased, short = (
        row_of(model, "chain", [*range(5)], lbyl.methods.LBYL(*each)) for each in weights
    )
    assert biased.bias < plain.bias and biased.residual > plain.residual
    assert short.norm < plain.norm and short.residual > plain.residual


def test_errors_of_layers_are_those_of_the_moments_of_their_channels() -> None:
    """WARE: what is missed over what there was, root mean squares, averaged over all channels."""
    model, x = build("dense", 2).double(), example("dense", 64).double()
    with torch.no_grad():
        model[0].weight[3] *= 1e-9  # all but dead: it has no scale of its own
        model[0].bias[3] = 1e-9
    found = layer_errors(lbyl.prepare(model, x, data=statistics_of(model, x)), (0.25, 0.5))
    assert len(found.rows) == 2 * 2 * 4 and "WARE" in str(found)
    mean, covariance = sampled(model, "3", x)
    second = covariance + torch.outer(mean, mean)
    power, norms = second.diagonal(), model[0].weight.detach().square().sum(1)
    norms = norms + model[0].bias.detach().square()
    for ratio, count in ((0.25, 12), (0.5, 8)):
        kept = norms.argsort(descending=True)[:count].sort().values
        gone = torch.tensor([i for i in range(16) if i not in kept])
        inner = covariance[kept][:, kept]
        inner = inner + 0.01 * inner.diagonal().mean() * torch.eye(count).double()
        s = torch.linalg.solve(inner, covariance[kept][:, gone]).T
        for method, rows in (("echo", s), ("none", 0 * s)):
            off = torch.zeros(len(gone), 16).double()
            off[:, kept], off[torch.arange(len(gone)), gone] = -rows, 1
            missed = ((off @ second) * off).sum(1)
            ware = (missed / power[gone].clamp(min=0.01 * float(power.mean()))).sqrt().sum() / 16
            (row,) = [r for r in found.rows if (r.unit, r.ratio, r.method) == ("0", ratio, method)]
            assert row.kept == count and row.ware == pytest.approx(float(ware))
