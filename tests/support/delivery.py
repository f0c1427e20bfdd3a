"""What a method delivers, read from the reader of a compressed network and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from support.networks import randomise


@dataclass(frozen=True)
class Layer:
    """A layer, its norm, an activation and a reader, in float64."""

    model: nn.Sequential
    x: Tensor

    @cached_property
    def prepared(self) -> lbyl.Prepared:
        return lbyl.prepare(self.model, self.x)

    @property
    def channels(self) -> int:
        return len(self.model[0].weight)

    @property
    def filters(self) -> Tensor:
        return self.model[0].weight.detach().flatten(1)

    @property
    def bias(self) -> Tensor:
        bias = self.model[0].bias
        return self.filters.new_zeros(self.channels) if bias is None else bias.detach()

    @property
    def rows(self) -> Tensor:
        """Filters with their bias, as for layers without a norm."""
        return torch.cat([self.filters, self.bias[:, None]], 1)

    @property
    def norm(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """γ, β, μ less the bias, the running variance and σ."""
        norm = self.model[1]
        values = norm.weight, norm.bias, norm.running_mean - self.bias, norm.running_var
        gamma, beta, mean, var = (value.detach() for value in values)
        return gamma, beta, mean, var, (var + norm.eps).sqrt()

    @property
    def folded(self) -> Tensor:
        """Filters and constants as the activation sees them."""
        if not hasattr(self.model[1], "running_var"):
            return self.rows
        gamma, beta, mean, _, sigma = self.norm
        scale = gamma / sigma
        return torch.cat([self.filters * scale[:, None], (beta - scale * mean)[:, None]], 1)

    @property
    def reader(self) -> Tensor:
        return self.model[3].weight.detach().flatten(1)

    def cut(self, kept: Tensor | int, method: Any) -> lbyl.Result:
        """Compressed to the channels that are kept, or to so many of the method's choice."""
        plan: Any = 1 - kept / self.channels if isinstance(kept, int) else None
        plan = lbyl.Plan({"0": kept}, {"0": self.channels}) if plan is None else {"0": plan}
        return self.prepared.compress(plan, method=method)

    def delivered(self, kept: Tensor, method: Any) -> Tensor:
        """S (channels, kept): what of each channel is written onto each kept one."""
        return self.carried(self.cut(kept, method))

    def carried(self, result: lbyl.Result) -> Tensor:
        new = result.model[3].weight.detach().flatten(1)
        return torch.linalg.lstsq(self.reader, new).solution


def layer(kind: str = "conv", seed: int = 0, channels: int = 10, repeats: bool = True) -> Layer:
    """ "conv", "linear", "bare conv" or "bare linear": the bare ones have no norm.

    The reader repeats the channels, or has weights of its own, enough of them to tell S.
    """
    bare, outputs = kind.startswith("bare"), channels + (0 if repeats else 3)
    if kind.endswith("linear"):
        first, last = nn.Linear(7, channels), nn.Linear(channels, outputs, bias=False)
        norm, x = nn.BatchNorm1d(channels, eps=0.01), torch.randn(3, 7)
    else:
        first: nn.Module = nn.Conv1d(3, channels, 9, padding=4, bias=seed % 2 == 0)
        last: nn.Module = nn.Conv1d(channels, outputs, 1, bias=False)
        norm, x = nn.BatchNorm1d(channels, eps=0.01), torch.randn(3, 3, 12)
    model = nn.Sequential(first, nn.Identity() if bare else norm, nn.ReLU(), last)
    randomise(model.double(), seed)
    if repeats:
        with torch.no_grad():
            last.weight.copy_(torch.eye(channels).reshape(last.weight.shape))
    return Layer(model, x.double())


def some_kept(channels: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Half of the channels, ascending, and the others."""
    order = torch.randperm(channels, generator=torch.Generator().manual_seed(seed))
    return order[: channels // 2].sort().values, order[channels // 2 :].sort().values


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance * (1 + float(wanted.abs().max()))
    )
