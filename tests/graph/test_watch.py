"""Which torch call is which consumer or BatchNorm, however its arguments are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from lbyl.graph.unit import Consumer
from lbyl.graph.watch import (
    LayerCall,
    NormCall,
    Watch,
    batch_norm_by_batch,
    batch_norm_with_moments,
)
from lbyl.restoring.refine import ConsumerOutputs

IMAGE = torch.zeros(1, 3, 10, 10)


class Named(nn.Module):
    """Layers called with arguments by name."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.named = named
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        second, norm, head = self.second, self.norm, self.head
        if not self.named:
            return head(norm(second(x)).mean((2, 3)))
        x = F.conv2d(input=x, weight=second.weight, bias=second.bias)
        x = F.batch_norm(
            x,
            running_var=norm.running_var,
            running_mean=norm.running_mean,
            bias=norm.bias,
            weight=norm.weight,
        )
        return F.linear(weight=head.weight, input=x.mean((2, 3)), bias=head.bias)


class Seen(Watch):
    def __init__(self, model: nn.Module, graph: lbyl.Graph, by_batch: bool) -> None:
        super().__init__(model, graph.consumers.values(), by_batch)
        self.calls: list[str] = []
        self.inputs: dict[str, Tensor] = {}

    def before_layer(self, consumer: Consumer, call: LayerCall) -> None:
        self.calls.append(consumer.name)
        self.inputs[consumer.name] = call.x

    def after_norm(self, call: NormCall, out: Tensor) -> None:
        self.calls.append("norm")
        self.inputs["norm"] = out


@pytest.mark.parametrize("by_batch", [False, True])
def test_arguments_by_name_are_seen_like_those_by_position(by_batch: bool) -> None:
    images = torch.randn(4, 3, 10, 10)
    seen: list[dict[str, Tensor]] = []
    for named in (False, True):
        model = Named(named).eval()
        watch = Seen(model, lbyl.trace(model, IMAGE), by_batch)
        with torch.no_grad(), watch:
            model(images)
        assert watch.calls == ["second", "norm", "head"]
        seen.append(watch.inputs)
    for name in seen[0]:
        torch.testing.assert_close(seen[0][name], seen[1][name])


def test_by_the_batch_running_statistics_are_neither_used_nor_changed() -> None:
    model = Named(True).eval()
    model.norm.running_mean += 100.0
    before = model.norm.running_mean.clone()
    watch = Seen(model, lbyl.trace(model, IMAGE), True)
    with torch.no_grad(), watch:
        model(torch.randn(4, 3, 10, 10))
    assert torch.equal(model.norm.running_mean, before)
    assert float(watch.inputs["norm"].mean().abs()) < 1e-5


def test_a_network_called_by_name_is_compressed_like_the_same_by_position() -> None:
    slim = [
        lbyl.compress(Named(named), IMAGE, {"*": 0.5}, criterion="l2", data=64, refine=3).model
        for named in (False, True)
    ]
    for (name, a), b in zip(slim[0].named_parameters(), slim[1].parameters()):
        torch.testing.assert_close(a, b, msg=name)


def test_consumers_behind_frozen_batchnorm_are_all_refined() -> None:
    ops = pytest.importorskip("torchvision.ops")
    torch.manual_seed(0)
    layers: list[Any] = []
    for i, o in ((3, 8), (8, 8), (8, 8), (8, 6)):
        layers += [nn.Conv2d(i, o, 3, bias=False), ops.FrozenBatchNorm2d(o), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 2 * 2, 4))
    graph = lbyl.trace(model, IMAGE)
    consumers = list(graph.consumers.values())
    names: list[str] = []
    with torch.no_grad(), ConsumerOutputs(model, consumers, True, lambda n, a, o: names.append(n)):
        model(torch.randn(2, 3, 10, 10))
    assert sorted(names) == sorted(c.name for c in consumers) and len(names) == 4
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 3)])
def test_batch_norm_with_moments_is_batch_norm_and_tells_those_of_the_batch(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = 2 * torch.randn(shape, dtype=dtype) + 3
    weight, bias = torch.randn(4, dtype=dtype), torch.randn(4, dtype=dtype)
    call = NormCall(x, None, None, {"weight": weight, "bias": bias, "eps": 1e-3})
    out, mean, variance = batch_norm_with_moments(call)
    torch.testing.assert_close(out, batch_norm_by_batch(call))
    rows = x.transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean, rows.mean(1))
    torch.testing.assert_close(variance.to(dtype), rows.var(1, correction=0), rtol=1e-4, atol=0)
