"""Weights by channel, as criteria and methods of one's own are given them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.networks import build, example, randomise

SEEN: dict[str, Any] = {}
conv = nn.Conv2d


@dataclass(frozen=True)
class Seen(lbyl.criteria.Criterion):
    """Keeps what it is given, and the first channels."""

    name = "seen"  # type: ignore[assignment]

    def score(self, weights: Any) -> Tensor:
        SEEN[weights.unit.name] = weights
        return -torch.arange(float(weights.unit.channels))


def weights_of(model: nn.Module, x: Tensor, name: str = "0", **options: Any) -> Any:
    lbyl.prepare(model, x, **options).plan(0.5, criterion=Seen(), method="none")
    return SEEN[name]


class Branches(nn.Module):
    """Two producers of one unit, read by a convolution, twice by a layer, and behind a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 6, 1), conv(3, 6, 3, padding=1, bias=False)
        self.c, self.d, self.e = conv(6, 2, 3), conv(12, 2, 1), nn.Linear(6 * 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x) + self.b(x))
        parts = [self.c(x), self.d(torch.cat([x, x], 1)), self.e(x.flatten(1))]
        return torch.cat([part.flatten(1) for part in parts], 1)


def test_filters_and_consumers_are_given_by_channel_in_float64() -> None:
    model = randomise(Branches())
    seen = weights_of(model, torch.randn(2, 3, 8, 8), "a")
    a, b, c, d, e = (getattr(model, n).weight.detach().double() for n in "abcde")
    assert torch.equal(seen.filters, torch.cat([a.flatten(1), b.flatten(1)], 1))
    bias = torch.stack([model.a.bias, torch.zeros(6)], 1).double()
    assert torch.equal(seen.filters_with_bias, torch.cat([seen.filters, bias], 1))
    rows = [c.transpose(0, 1).flatten(1), d.view(2, 2, 6).permute(2, 1, 0).flatten(1)]
    rows.append(e.view(2, 6, 64).permute(1, 2, 0).flatten(1))
    assert torch.equal(seen.consumer_weights, torch.cat(rows, 1)) and seen.norm is None


def test_groups_of_filters_are_one_channel() -> None:
    model = nn.Sequential(conv(3, 12, 1), conv(12, 24, 3, groups=4), nn.ReLU(), conv(24, 4, 1))
    seen = weights_of(model, torch.randn(2, 3, 8, 8))
    assert torch.equal(seen.filters, model[0].weight.double().reshape(4, 9))
    assert seen.unit.channels == 4


def test_folded_filters_are_what_the_activation_sees() -> None:
    model, x = build("chain").double(), example("chain", 5).double()
    seen = weights_of(model, x)
    patches = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
    ones = torch.ones(len(patches), 1, dtype=torch.float64)
    with torch.no_grad():
        wanted = model[:2](x).flatten(2).transpose(1, 2).flatten(0, 1)
        deviation = (model[1].running_var + model[1].eps).sqrt()
    torch.testing.assert_close(torch.cat([patches, ones], 1) @ seen.folded.T, wanted)
    torch.testing.assert_close(seen.norm.scale, model[1].weight.detach() / deviation)
    assert torch.equal(seen.norm.gamma, model[1].weight) and torch.equal(
        seen.norm.beta, model[1].bias
    )


READERS: dict[str, Callable[[], list[nn.Module]]] = {
    "strided": lambda: [conv(6, 4, 3, stride=2, padding=1)],
    "transposed": lambda: [nn.ConvTranspose2d(6, 4, 3, stride=2)],
    "depthwise between": lambda: [conv(6, 6, 3, groups=6), nn.ReLU(), conv(6, 4, 1)],
    "flatten": lambda: [nn.Flatten(), nn.Linear(6 * 64, 4)],
    "pooled": lambda: [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4, bias=False)],
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("method", ["one-to-one", "neuron-merging"])
def test_a_channel_like_another_goes_without_a_trace_into_every_reader(
    method: str, kind: str
) -> None:
    model = randomise(nn.Sequential(conv(3, 6, 3, padding=1), nn.ReLU(), *READERS[kind]())).double()
    with torch.no_grad():
        for layer in [model[0], *(m for m in model if getattr(m, "groups", 1) > 1)]:
            layer.weight[4], layer.bias[4] = layer.weight[1], layer.bias[1]
    x = torch.randn(3, 3, 8, 8).double()
    plan = lbyl.Plan({"0": torch.tensor([0, 1, 2, 3, 5])}, {"0": 6})
    slim = lbyl.compress(model, x, plan, method=method).model
    assert slim[0].out_channels == 5
    torch.testing.assert_close(slim(x), model(x), rtol=1e-10, atol=1e-10)
