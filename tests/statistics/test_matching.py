"""Data-free moments matched to what the BatchNorm behind a layer remembers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl

# private: a device matches readers of one shape in one go, a processor never has more than one
from lbyl.statistics.match import Known, matched_alike

# private: readers are matched together on a device alone, and these go in there
from lbyl.statistics.moments import Moments
from support.delivery import close
from support.networks import randomise

DAMPING, SMOOTHING, SMALLEST = 0.01, 0.01, 1e-6


def changed_least(root: Tensor, rows: Tensor, target: Tensor) -> Tensor:
    """`root rootᵀ` with about the least change under which `rows rowsᵀ` has a diagonal.

    By Kullback and Leibler that is root (I + rowsᵀ Λ rows)⁻¹ rootᵀ. Two smoothed Newton steps find
    Λ, each halved as long as the diagonal does not come nearer.
    """
    scale = rows.norm(dim=1).reciprocal()
    unit, target = rows * scale[:, None], target * scale**2
    eye = torch.eye(rows.shape[1]).double()
    best = torch.zeros_like(scale)

    def tried(shift: Tensor) -> tuple[Tensor, Tensor]:
        """(misfit, products)"""
        changed = eye + unit.T @ torch.diag(shift) @ unit
        if torch.linalg.eigvalsh(changed)[0] <= 0:
            return torch.tensor(torch.inf), changed
        products = unit @ changed.inverse() @ unit.T
        return (products.diagonal() / target).log().square().sum(), products

    for _ in range(2):
        misfit, products = tried(best)
        now = products.diagonal()
        curvature = products**2 + SMOOTHING * torch.eye(len(now)).double()
        step = torch.linalg.solve(curvature, now * (now - target) / target)
        lengths = [best + step / 2**halved for halved in range(4)]
        nearer = [shift for shift in lengths if tried(shift)[0] < misfit]
        if not nearer:
            break
        best = nearer[0]
    return root @ (eye + unit.T @ torch.diag(best) @ unit).inverse() @ root.T


def matched(
    mean: Tensor, old: Tensor, weight: Tensor, asked: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Jeffrey's rule: inputs given outputs stay as they are, outputs get what is remembered."""
    now = ((weight @ old) * weight).sum(1)
    varies = now > 1e-6 * now.mean()
    target = now * torch.where(varies, asked[1] / now, 1.0).clamp(0.25, 4.0)
    noise = DAMPING * now.mean() * torch.eye(len(weight)).double()
    gap = asked[0] - weight @ mean
    outputs, features = weight.shape
    small = SMALLEST * old.diagonal().mean() * torch.eye(features).double()
    given = old if outputs <= features else old + small
    seen = weight @ given @ weight.T + noise
    regression = torch.linalg.solve(seen, weight @ given).T
    shifted = mean + regression @ gap
    if outputs > features:
        root = torch.linalg.cholesky(given)
        return shifted, changed_least(root, (weight @ root)[varies], target[varies])
    root = torch.linalg.cholesky(seen)
    change = changed_least(root, root, target + noise.diagonal()) - seen
    return shifted, old + regression @ change @ regression.T


def network(kind: str, outputs: int, seed: int) -> nn.Sequential:
    """Three readers of one shape, one after the other, each with a norm behind it."""
    if kind == "linear":
        parts: list[nn.Module] = [nn.Linear(5, 8), nn.ReLU()]
        for width in (8, outputs):
            parts += [nn.Linear(width, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    else:
        size = 3 if kind == "windows" else 1
        parts = [nn.Conv2d(3, 6, 1), nn.ReLU()]
        for width in (6, outputs, outputs):
            parts += [nn.Conv2d(width, outputs, size, bias=False), nn.BatchNorm2d(outputs)]
            parts += [nn.ReLU()]
    return randomise(nn.Sequential(*parts), seed).double()  # type: ignore[return-value]


def assert_matched(model: nn.Sequential, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What was collected is matched as defined; (before, after) by reader: covariances."""
    prepared = lbyl.prepare(model, x, data=40)
    found = prepared.statistics()
    (images,) = prepared.fresh.collection().batches
    state = {name: value.clone() for name, value in model.state_dict().items()}
    told, seen = {}, images
    for number, layer in enumerate(model.train()):
        before, seen = seen, layer(seen).detach()
        moments = found.moments.get(str(number))
        if moments is None:
            continue
        weight = layer.weight.detach()
        if weight.dim() > 2:
            filters = torch.eye(weight[0].numel()).double().reshape(-1, *weight.shape[1:])
            before = layer._conv_forward(before, filters, None).movedim(1, -1).flatten(0, -2)
        mean, old = before.mean(0).detach(), torch.cov(before.detach().T, correction=0)
        behind: Any = model[number + 1]
        bias = 0 if layer.bias is None else layer.bias.detach()
        asked = state[f"{number + 1}.running_mean"] - bias, state[f"{number + 1}.running_var"]
        assert isinstance(behind, nn.modules.batchnorm._BatchNorm)
        wanted_mean, wanted = matched(mean, old, weight.flatten(1), asked)
        close(moments.mean.flatten(), wanted_mean, 1e-7)
        close(moments.covariance, wanted, 1e-7)
        assert float(torch.linalg.eigvalsh(moments.covariance)[0]) > -1e-9
        assert (moments.mixed is None) == (4 * weight.shape[0] > len(old))
        if moments.mixed is not None:
            close(moments.mixed, weight.flatten(1) @ moments.covariance)
        told[str(number)] = old, moments.covariance
    model.load_state_dict(state)
    model.eval()
    return told


KINDS = [("pixels", 3), ("pixels", 6), ("pixels", 9), ("windows", 4), ("linear", 2), ("linear", 20)]


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_moments_agree_with_running_statistics_by_the_least_change(
    kind: str, outputs: int, seed: int
) -> None:
    model = network(kind, outputs, seed)
    x = torch.randn(2, 5).double() if kind == "linear" else torch.randn(2, 3, 9, 9).double()
    told = assert_matched(model, x).values()
    assert any(not torch.allclose(old, new, rtol=0.01) for old, new in told)


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_what_running_statistics_ask_is_limited_and_may_contradict_itself(
    kind: str, outputs: int
) -> None:
    """One output is dead, one asks too much, one too little; two that are equal disagree."""
    model = network(kind, outputs, 2)
    x = torch.randn(2, 5).double() if kind == "linear" else torch.randn(2, 3, 9, 9).double()
    with torch.no_grad():
        for layer, norm in pairwise(model):
            if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
                continue
            norm.running_var[0], norm.running_var[1] = 1e-9, 1e9
            if outputs > 3:
                layer.weight[2] *= 1e-9
                layer.weight[3] = layer.weight[1]
                norm.running_var[3] = 1e-3
    assert_matched(model, x)


@pytest.mark.parametrize("factor", [1e-9, 0.3, 3.0, 1e9])
def test_one_output_gets_its_variance_within_limits(factor: float) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 1), nn.BatchNorm1d(1))
    randomise(model).double()
    x = torch.randn(3, 4).double()
    weight = model[2].weight.detach()
    (images,) = lbyl.prepare(model, x, data=40).fresh.collection().batches
    was = model[2](model[0](images)).detach().var(correction=0)
    model[3].running_var[:] = factor * was
    found = lbyl.prepare(model, x, data=40).statistics().moments["2"]
    now = float(weight @ found.covariance @ weight.T / was)
    wanted = 1 + (min(max(factor, 0.25), 4.0) - 1) / (1 + DAMPING) ** 2
    assert now == pytest.approx(wanted, rel=0.003)
    # What the output does not tell of its inputs is left alone.
    old = torch.cov(model[0](images).detach().T, correction=0)
    across = [(c @ weight.T) for c in (old, found.covariance)]
    change = found.covariance - old
    direction = across[0] / across[0].norm()
    close(change, direction @ direction.T * change.trace())
    with torch.no_grad():  # an output that is always the same asks for nothing, and nobody notes it
        model[2].weight.zero_()
    found = lbyl.prepare(model, x, data=40).statistics()
    assert not found.fallbacks
    close(found.moments["2"].covariance, old)


@pytest.mark.parametrize("outputs", [2, 5, 8])
def test_readers_that_are_matched_in_one_go_get_what_each_gets_alone(outputs: int) -> None:
    """Of one an output is dead, of one all are, one is as asked, and one contradicts itself."""
    generator = torch.Generator().manual_seed(outputs)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    asked = []
    for number in range(6):
        root, weight = drawn(5, 5), drawn(outputs, 5)
        weight[0] = (1e-9 * weight[0], weight[1])[number % 2] if number in (1, 4) else weight[0]
        weight *= number != 2
        old, factor = root @ root.T, 10 ** drawn(outputs) if number != 3 else 1
        mean, known = drawn(5, 1), ((weight @ old) * weight).sum(1) * factor
        asked.append((mean, old, weight, drawn(outputs), known))

    def given(some: list[tuple[Tensor, ...]]) -> list[Known]:
        return [Known(Moments(m, c.clone()), w, *rest) for m, c, w, *rest in some]

    for number, found in enumerate(matched_alike(given(asked))):
        (alone,) = matched_alike(given(asked[number : number + 1]))
        assert found is not None and alone is not None
        mean, old, weight, *rest = asked[number]
        wanted = (mean[:, 0], old)
        if number != 2:
            wanted = matched(mean[:, 0], old, weight, (rest[0], rest[1]))
        for one in (found, alone):
            close(one.mean[:, 0], wanted[0], 1e-7)
            close(one.covariance, wanted[1], 1e-7)
