"""What the closed form has to write, computed from samples and definitions alone, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from support.networks import consumer_samples

LIMITS = (0.05, 4.0)  # between which the variance of an output is put back


def plan_of(graph: lbyl.Graph, kept: Mapping[str, Sequence[int] | Tensor]) -> lbyl.Plan:
    """A plan made by hand: which channels stay, of the units named."""
    indices = {name: torch.as_tensor(some) for name, some in kept.items()}
    return lbyl.Plan(indices, {name: graph[name].channels for name in kept})


def sampled(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (rows,) and covariance (rows, rows) of all that a layer reads, tap by tap."""
    rows = consumer_samples(model, layer, x)[0].flatten(0, -2).double()
    return rows.mean(0), torch.cov(rows.T, correction=0)


def statistics_of(model: nn.Module, x: Tensor, **tracing: Any) -> lbyl.Statistics:
    """Statistics that are those of the inputs given and of nothing else."""
    found = lbyl.prepare(model, x[:2], data=x, **tracing).statistics()
    moments = {}
    for name, old in found.moments.items():
        mean, covariance = sampled(model, name, x)
        moments[name] = replace(
            old, mean=mean.reshape(old.mean.shape), covariance=covariance, mixed=None
        )
    return replace(found, moments=moments, orders={}, totals={}).without_weights()


@dataclass(frozen=True)
class Reader:
    """A layer that reads a unit's channels: moments of what it reads, and its weight as a matrix.

    `weight` is (outputs, features, taps). With `alike` its taps are served alike: `covariance` is
    of features, and `alike` (taps, taps) says how much one feature at two taps has in common.
    """

    weight: Tensor
    mean: Tensor  # (features · taps,)
    covariance: Tensor
    alike: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """(features · taps, features · taps)"""
        return self.covariance if self.alike is None else torch.kron(self.covariance, self.alike)

    def restored(self, kept: Tensor, ridge: float = 0.01, second: bool = False) -> Tensor:
        """V_P + V_Q C_QP (C_PP + εI)⁻¹; by `second` moments where nothing takes the mean."""
        covariance, taps = self.covariance, self.weight.shape[2]
        flags = kept if self.alike is not None else kept.repeat_interleave(taps)
        if second:
            covariance = covariance + torch.outer(self.mean, self.mean)
        old = self.weight.transpose(1, 2).flatten(0, 1)
        if self.alike is None:
            old = self.weight.flatten(1)
        inner = covariance[flags][:, flags]
        inner = inner + ridge * inner.diagonal().mean() * torch.eye(len(inner)).double()
        new = (
            old[:, flags]
            + old[:, ~flags] @ torch.linalg.solve(inner, covariance[flags][:, ~flags]).T
        )
        if self.alike is None:
            return new.unflatten(1, (-1, taps))
        return new.unflatten(0, (-1, taps)).transpose(1, 2)

    def moved(self, new: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, float]:
        """How the output's mean and variance move, and the relative error of the whole output."""
        full = torch.zeros_like(self.weight)
        full[:, kept] = new
        old, new = self.weight.flatten(1), full.flatten(1)
        was, now, off = (((w @ self.whole) * w).sum(1) for w in (old, new, new - old))
        ratio = torch.where(was > 1e-12 * was.max(), now / was, 1.0).clamp(*LIMITS)
        return (new - old) @ self.mean, ratio, float(off.sum() / was.sum())


def reader(model: nn.Module, layer: str, x: Tensor) -> Reader:
    """A layer with the moments of what it reads."""
    weight = model.get_submodule(layer).weight.detach().double()
    return Reader(
        weight.flatten(2) if weight.dim() > 2 else weight[..., None], *sampled(model, layer, x)
    )


def batch_moments(
    model: nn.Module, norms: Sequence[str], x: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance of what enters every BatchNorm, which all normalise by the batch."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles: list[Any] = []

    def looking(name: str) -> Callable[..., Tensor]:
        def look(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            dims = [d for d in range(args[0].dim()) if d != 1]
            var, mean = torch.var_mean(args[0], dims, correction=0)
            seen[name] = mean, var
            shape = [1, -1] + [1] * (args[0].dim() - 2)
            scale = module.weight / (var + module.eps).sqrt()  # type: ignore[operator]
            shift = module.bias - mean * scale
            return args[0] * scale.view(shape) + shift.view(shape)

        return look

    handles = [model.get_submodule(n).register_forward_hook(looking(n)) for n in norms]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def repeated(x: Tensor) -> list[Tensor]:
    """The same few inputs again and again: any three quarters and any quarter are alike."""
    parts = [part.repeat(4, *[1] * (x.dim() - 1)) for part in x.split(16)]
    assert len(x) in (16, 32, 64)
    return parts * (24 // len(parts))  # so many that nothing data-free is wanted beside them


def half_sure(scores: Tensor) -> float:
    """The temperature at which the mean entropy of answers is half of the greatest."""
    low, high = 1e-9, 1e9
    for _ in range(200):
        middle = (low * high) ** 0.5
        p = torch.log_softmax(scores / middle, 1)
        sure = float(-(p.exp() * p).sum(1).mean()) < 0.5 * math.log(scores.shape[1])
        low, high = (middle, high) if sure else (low, middle)
    return low


def divergence(model: nn.Module, slim: nn.Module, x: Tensor, warmer: float = 1.0) -> float:
    """Of answers at half certainty (times `warmer`), else the relative squared error."""
    with torch.no_grad():
        teacher, student = model(x), slim(x)
    if teacher.dim() != 2 or teacher.shape[1] < 2:
        return float((teacher - student).square().mean() / teacher.var(correction=0))
    warm = warmer * half_sure(teacher)
    p, q = (torch.log_softmax(scores / warm, 1) for scores in (teacher, student))
    return float((p.exp() * (p - q)).sum(1).mean())
