"""Attention of language models, whatever embeds its positions: cut exactly, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl

hf = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
NAMES = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": 64, "n_positions": 40}
PART = {"partial_rotary_factor": 0.5}  # of a head's channels that are turned, the rest are not
OWN: dict[str, dict[str, Any]] = {
    "Phi": PART,
    "GPTNeoX": {"rotary_pct": 0.5, **PART},
    "StableLm": {"num_key_value_heads": 2, **PART},
    "Nemotron": {"num_key_value_heads": 2, **PART},
    "GPTJ": {"vocab_size": 99, "rotary_dim": 4, **NAMES},
    "Bloom": {"vocab_size": 99, "hidden_size": 32, "n_layer": 1, "n_head": 4},
}
KINDS = ("heads", "qk", "v", "queries")
LACKING = {"queries": {"GPTNeoX", "GPTJ", "Bloom", "Phi"}}  # no heads share keys


class Logits(nn.Module):
    """A language model's logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A tiny model in float64 with weights that are not near zero, and tokens for it."""
    torch.manual_seed(0)
    own = OWN[name]
    config = getattr(hf, f"{name}Config")(**(own if "vocab_size" in own else {**SIZES, **own}))
    model = Logits(getattr(hf, f"{name}ForCausalLM")(config)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model, torch.randint(4, 99, (2, 12))


def silenced(model: nn.Module, graph: lbyl.Graph, plan: lbyl.Plan) -> nn.Module:
    """The original in which nothing reads pruned channels; queries and keys have zeros there."""
    quiet = copy.deepcopy(model)
    state = dict(quiet.named_parameters())
    gone: dict[str, Tensor] = {}
    for unit in graph:
        flags = torch.ones(unit.channels, dtype=torch.bool)
        flags[plan.kept[unit.name]] = False
        gone[unit.name] = flags

    def pruned(channel: Tensor) -> Tensor:
        hit = torch.zeros(len(channel), dtype=torch.bool)
        for unit in graph:
            local = unit.local(channel)
            hit |= (local >= 0) & gone[unit.name][local.clamp(min=0)]
        return hit

    with torch.no_grad():
        for reader in graph.consumers.values():
            state[reader.weight].movedim(reader.axis, 0)[pruned(reader.channel)] = 0
        for unit in graph:
            for maker in unit.producers if unit.kind == "qk" else ():
                rows = pruned(graph.axes[maker.weight, maker.axis])
                state[maker.weight].movedim(maker.axis, 0)[rows] = 0
                if maker.bias is not None:
                    state[maker.bias][rows] = 0
    return quiet


SOME = [  # each family once, each kind with some of them; all where there is time
    pytest.param(name, kind, marks=() if (i + j) % 4 == 1 else pytest.mark.slow)
    for i, name in enumerate(OWN)
    for j, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "kind"), SOME)
def test_a_cut_of_attention_equals_the_silenced_original(name: str, kind: str) -> None:
    model, x = build(name)
    graph = lbyl.trace(model, x, include=["*", f"*:{kind}"])
    named = [unit.name for unit in graph if unit.name.endswith(f":{kind}")]
    if name in LACKING.get(kind, set()):
        reasons = [why for unit, why in graph.unprunable.items() if unit.endswith(f":{kind}")]
        assert not named and all("no heads share" in why for why in reasons) and reasons
        return
    assert len(named) == 1
    prepared = lbyl.Prepared(model, x, graph)
    with torch.no_grad():
        cut = prepared.compress(0.5, method="none", criterion="random")
        assert set(named) <= set(cut.plan.pruned)
        assert torch.allclose(cut.model(x), silenced(model, graph, cut.plan)(x), atol=1e-9)
        restored = prepared.compress(cut.plan)
        assert restored.model(x).isfinite().all()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "StableLm" else pytest.mark.slow) for n in OWN]
)
def test_attention_and_the_width_of_the_stream_go_together(name: str) -> None:
    model, x = build(name)
    both = lbyl.compress(model, x, 0.4, residual=True, include=["*", "*:*"])
    kinds = {unit.kind for unit in both.graph if unit.name in both.plan.pruned}
    assert kinds >= {"channels", "qk", "v"}
    with torch.no_grad():
        assert both.model(x).isfinite().all() and both.model(x).shape == model(x).shape


class Partial(nn.Module):
    """An attention that turns the first two of four pairs of channels, interleaved or in halves."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.interleaved = interleaved

    def turned(self, x: Tensor) -> Tensor:
        first, rest = x[..., :4], x[..., 4:]
        angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([0.3, 0.05])
        if self.interleaved:
            angle = angle.repeat_interleave(2, -1)
            other = torch.stack([-first[..., 1::2], first[..., ::2]], -1).flatten(-2)
        else:
            angle = torch.cat([angle, angle], -1)
            other = torch.cat([-first[..., 2:], first[..., :2]], -1)
        return torch.cat([first * angle.cos() + other * angle.sin(), rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_restored_queries_are_nearer_than_those_only_cut(interleaved: bool) -> None:
    """Turned pairs get a factor and a turn, single channels beside them a factor."""
    torch.manual_seed(0)
    model = Partial(interleaved).eval()
    with torch.no_grad():  # channels that go together, so that some can stand for others
        for layer in (model.q, model.k):
            layer.weight[5] = layer.weight[4] + 0.1 * layer.weight[5]
            layer.weight *= 3
    own = torch.randn(64, 10, 16)
    prepared = lbyl.prepare(model, own[:2], include="*:qk", data=own)
    unit = prepared.graph[":qk"]
    assert unit.channels == 2 * (2 + 4)
    plan = lbyl.Plan({":qk": torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 10, 11])}, {":qk": 12})
    off = {}
    for method in ("none", "echo"):
        slim = prepared.compress(plan, method=method).model
        with torch.no_grad():
            off[method] = float((slim(own) - model(own)).square().mean())
    assert off["echo"] < 0.7 * off["none"], off


class Folded(nn.Module):
    """An attention that hands heads and batch, or windows beside them, to torch's kernel."""

    def __init__(self, windows: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.windows = windows

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        batch, length = x.shape[:2]
        q, k, v = (
            layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.windows:
            part = length // self.windows
            q, k, v = (y.unflatten(2, (self.windows, part)).transpose(1, 2) for y in (q, k, v))
            given = mask[:part, :part].expand(batch, self.windows, 3, part, part)
            y = F.scaled_dot_product_attention(q, k, v, given).transpose(1, 2).flatten(2, 3)
        else:
            q, k, v = (F.elu(y).flatten(0, 1) for y in (q, k, v))
            given = mask.expand(batch * 3, length, length)
            y = F.scaled_dot_product_attention(q, k, v, given).unflatten(0, (batch, 3))
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("windows", [0, 2])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_masks_of_any_rank_are_understood(windows: int, kind: str) -> None:
    torch.manual_seed(0)
    model, x = Folded(windows).eval(), torch.randn(5, 8, 6)
    try:
        result = lbyl.compress(
            model, x, 0.5, include=["*", f"*:{kind}"], data=torch.randn(31, 8, 6)
        )
    except lbyl.LbylError as error:
        assert "\n" not in str(error)
        return
    assert result.model(x).isfinite().all()


class Normed(nn.Module):
    """Four queries for two keys; a norm over the queries of all heads, or over what they give."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 16), nn.Linear(12, 8), nn.Linear(12, 8)
        self.norm, self.out = nn.RMSNorm(16), nn.Linear(16, 12)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x) if self.behind else self.norm(self.q(x))
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, self.k(x), self.v(x)))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.out(self.norm(y) if self.behind else y)
        return out


@pytest.mark.parametrize("behind", [False, True])
def test_single_heads_that_a_norm_hears_together_stay(behind: bool) -> None:
    torch.manual_seed(0)
    graph = lbyl.trace(Normed(behind).eval(), torch.randn(3, 5, 12), include="*:queries")
    assert not graph.names and ":queries" in graph.unprunable
