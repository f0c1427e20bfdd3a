"""Channels of a residual stream pruned through LayerNorm and RMSNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.methods import Echo
from support.by_hand import statistics_of

WIDTH, TOKENS = 8, 40


class WrittenOut(nn.Module):
    """An RMSNorm in arithmetic, as language models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)
        return self.weight * (x * scale).to(x.dtype)


class FromOne(nn.Module):
    """The same with a scale that counts from 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)
        return x * (1.0 + self.weight.float())


class Block(nn.Module):
    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class PreNorm(nn.Module):
    """A table, two blocks with a norm in front, a norm and a head."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, width)
        self.blocks = nn.Sequential(Block(norm(width), width), Block(norm(width), width))
        self.norm, self.head = norm(width), nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.norm(self.blocks(self.table(tokens)))))


def layer_norm(width: int) -> nn.Module:
    norm = nn.LayerNorm(width, eps=1e-12)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias)
    return norm


def rms_norm(width: int) -> nn.Module:
    norm = nn.RMSNorm(width, eps=1e-12)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


NORMS = {"layer": layer_norm, "rms": rms_norm, "written out": WrittenOut, "from one": FromOne}
UNIT = "blocks.0.down"


def network(kind: str, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return PreNorm(NORMS[kind], width).eval()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(TOKENS, (32, 6), generator=torch.Generator().manual_seed(1))


def own_statistics(model: nn.Module, tokens: Tensor) -> lbyl.Statistics:
    return statistics_of(model, tokens, residual=True)


def stream(model: nn.Module) -> list[Tensor]:
    """Everything that writes into the stream, channels along the last dimension."""
    down = [p for name, p in model.named_parameters() if ".down." in name]
    table = model.get_parameter("table.weight")
    return [table, *(p.data.T if p.dim() > 1 else p.data for p in down)]


@pytest.mark.parametrize("kind", NORMS)
def test_norms_pass_the_channels_of_a_residual_stream_on(kind: str, tokens: Tensor) -> None:
    model = network(kind)
    graph = lbyl.trace(model, tokens, residual=True)
    unit = graph[UNIT]
    assert unit.residual and unit.channels == WIDTH
    assert set(unit.consumers) == {"blocks.0.up", "blocks.1.up", "head"}
    assert {"table", "blocks.0.norm", "blocks.1.norm", "norm"} <= set(unit.between)
    assert [norm.consumers for norm in graph.channel_norms] == [
        ("blocks.0.up",),
        ("blocks.1.up",),
        ("head",),
    ]
    with pytest.raises(lbyl.LbylError, match="no unit"):
        lbyl.trace(model, tokens)[UNIT]


@pytest.mark.parametrize("kind", ["rms", "written out", "from one"])
def test_an_rms_norm_over_kept_channels_is_that_with_zeros_in_place_of_the_others(
    kind: str, tokens: Tensor
) -> None:
    model = network(kind)
    kept = torch.tensor([0, 2, 3, 5, 7])
    pruned = torch.tensor([1, 4, 6])
    silent = copy.deepcopy(model)
    with torch.no_grad():
        for written in stream(silent):
            written[..., pruned] = 0
    plan = lbyl.Plan({UNIT: kept}, {UNIT: WIDTH})
    slim = lbyl.compress(model, tokens, plan, method="none", residual=True).model
    assert torch.allclose(slim(tokens), silent(tokens), atol=1e-5)
    assert not torch.allclose(slim(tokens), model(tokens), atol=1e-2)


@pytest.mark.parametrize("kind", NORMS)
def test_channels_that_repeat_others_go_without_a_trace(kind: str, tokens: Tensor) -> None:
    model = network(kind, 2 * WIDTH)
    with torch.no_grad():
        for written in stream(model):
            written[..., WIDTH:] = written[..., :WIDTH]
    plan = lbyl.Plan({UNIT: torch.arange(WIDTH)}, {UNIT: 2 * WIDTH})
    data = own_statistics(model, tokens)
    result = lbyl.compress(model, tokens, plan, method=Echo(ridge=1e-9), residual=True, data=data)
    assert torch.allclose(result.model(tokens), model(tokens), atol=1e-3)
    assert result.model.get_parameter("table.weight").shape == (TOKENS, WIDTH)


@pytest.mark.parametrize("kind", NORMS)
def test_scale_and_shift_are_corrected_by_what_the_norm_gives_on_average(
    kind: str, tokens: Tensor
) -> None:
    model = network(kind)
    kept = torch.tensor([0, 1, 2, 4, 5, 6])
    plan, data = lbyl.Plan({UNIT: kept}, {UNIT: WIDTH}), own_statistics(model, tokens)
    slim = lbyl.compress(model, tokens, plan, residual=True, data=data).model
    x = model.get_submodule("table")(tokens).detach().flatten(0, 1).double()
    offset = 1.0 if kind == "from one" else 0.0
    gamma = model.get_parameter("blocks.0.norm.weight").detach().double() + offset
    centre = x.mean(1, keepdim=True) if kind == "layer" else 0.0
    u = (x - centre) / (x - centre).square().mean(1, keepdim=True).sqrt()
    left = u[:, kept]
    mean = left.mean(1, keepdim=True) if kind == "layer" else torch.zeros(len(u), 1).double()
    size = ((left - mean).square().mean(1)).mean().sqrt()
    got = slim.get_parameter("blocks.0.norm.weight").detach().double() + offset
    assert torch.allclose(got, gamma[kept] * size, rtol=1e-4)
    if kind == "layer":
        beta = model.get_parameter("blocks.0.norm.bias").detach().double()
        shifted = slim.get_parameter("blocks.0.norm.bias").detach().double()
        assert torch.allclose(shifted, beta[kept] + gamma[kept] * mean.mean(), atol=1e-5)
        normed = slim.get_submodule("blocks.0.norm")
        assert isinstance(normed, nn.LayerNorm) and normed.normalized_shape == (6,)


def test_a_table_that_is_also_the_head_stays_one_and_is_only_cut(tokens: Tensor) -> None:
    model = network("rms")
    head = nn.Linear(WIDTH, TOKENS, bias=False)
    model.add_module("head", head)
    head.weight = model.get_submodule("table").weight  # type: ignore[assignment]
    result = lbyl.compress(model, tokens, {UNIT: 0.25}, residual=True, data=tokens)
    slim, kept = result.model, result.plan.kept[UNIT]
    assert slim.get_submodule("head").weight is slim.get_submodule("table").weight
    table = model.get_parameter("table.weight")
    assert torch.equal(slim.get_parameter("table.weight"), table[:, kept])


def test_a_mean_over_channels_that_is_no_norm_keeps_them(tokens: Tensor) -> None:
    class Gated(WrittenOut):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.sigmoid(x.pow(2).mean(-1, keepdim=True))

    torch.manual_seed(0)
    graph = lbyl.trace(PreNorm(Gated).eval(), tokens, residual=True)
    assert "mixes its channels" in graph.unprunable[UNIT]
