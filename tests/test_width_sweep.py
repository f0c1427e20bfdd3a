"""The width of the residual stream in the architectures of Transformers: found, cut, loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.surgery.indices import pruned_of
from support import architectures
from support.reference import distance

pytest.importorskip("transformers")

FAST = ("llama", "gpt2", "t5", "vit")
# Norms without a scale of their own, positions that are indexed or computed, other layouts.
NONE = "bart cohere dpt longformer m2m_100 mbart nemotron olmo plbart squeezebert xglm".split()
CASES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in architectures.NAMES
    if name not in NONE
]


class Headed(nn.Module):
    """A network whose last states a layer reads, as a head does."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(last_states(self.inner, x)))


def last_states(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out if isinstance(out, Tensor) else torch.as_tensor(out[0])


def build(name: str) -> tuple[nn.Module, Tensor]:
    model, x = architectures.build(name)
    model = Headed(model.eval(), last_states(model, x).shape[-1]).eval()
    for module in model.modules():  # a norm's ε is what zeros do not divide alike
        for attribute in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 1e-12)
    return model, x


def silent(model: nn.Module, graph: lbyl.Graph, unit: Any, kept: Tensor) -> nn.Module:
    """The original in which nothing is written into the pruned channels of the stream."""
    quiet = copy.deepcopy(model)
    state = {**dict(quiet.named_parameters()), **dict(quiet.named_buffers())}
    pruned = unit.start + pruned_of(unit.channels, kept)
    read = {(c.weight, c.axis) for c in graph.consumers.values()} - {(t, 1) for t in graph.tables}
    norms = {norm.weight for norm in graph.channel_norms}
    with torch.no_grad():
        for (name, axis), channel in graph.axes.items():
            gone = torch.nonzero(torch.isin(channel, pruned)).reshape(-1)
            if len(gone) and (name, axis) not in read and name not in norms:
                state[name].index_fill_(axis, gone, 0)
    return quiet


def test_most_architectures_have_a_stream_that_can_be_narrower() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_width_of(name: str, tmp_path: Path) -> None:
    model, x = build(name)
    fresh = copy.deepcopy(model)
    graph = lbyl.trace(model, x, residual=True)
    touched = {axis[0] for axis in graph.axes}
    streams = [
        u for u in graph if u.residual and any(n.weight in touched for n in graph.channel_norms)
    ]
    assert streams
    unit = streams[0]
    prepared = lbyl.Prepared(model, x, graph)
    result = prepared.compress({unit.name: 0.25}, method="none", criterion="random")
    with torch.no_grad():
        slim = result.model(x)
        assert slim.shape == model(x).shape and bool(slim.isfinite().all())
        if not any(norm.centred for norm in graph.channel_norms):
            reference = silent(model, graph, unit, result.plan.kept[unit.name])
            assert distance(reference(x), slim) < 1e-4
        assert result.after.parameters < result.before.parameters
        lbyl.save(result, tmp_path / "out")
        assert torch.equal(lbyl.load(tmp_path / "out", model=fresh)(x), slim)
    torch.autograd.backward(result.model(x).square().mean())
