"""Heads, query and key channels and value channels: found by rules, cut exactly, still a model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lbyl
from support.attention import HEADS, KINDS, SIZE, Kernel, block, silenced

UNITS = ("heads", "qk", "v")
ALL = [f"*:{unit}" for unit in UNITS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_has_its_three_units(kind: str) -> None:
    model, x = block(kind)
    graph = lbyl.trace(model, x, include=ALL)
    assert [unit.kind for unit in graph] == list(UNITS)
    heads, qk, v = graph
    groups = 2 if kind == "rotary" else HEADS
    assert heads.channels == groups
    assert qk.channels == groups * (SIZE // 2 if kind == "rotary" else SIZE)
    assert v.channels == groups * SIZE
    assert qk.blocks == v.blocks == groups
    assert not graph.unprunable.keys() & {p.name for unit in graph for p in unit.producers}


@pytest.mark.parametrize("unit", [*UNITS, "*"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_equals_the_silenced_original(kind: str, unit: str, tmp_path: Path) -> None:
    model, x = block(kind)
    fresh = copy.deepcopy(model)
    prepared = lbyl.prepare(model, x, include=f"*:{unit}")
    result = prepared.compress(0.5, method="none", criterion="random")
    with torch.no_grad():
        slim, reference = result.model(x), silenced(model, prepared.graph, result.plan.kept)(x)
        assert torch.allclose(slim, reference, atol=1e-12)
        assert not torch.allclose(slim, model(x), atol=1e-3)
        assert result.after.parameters < result.before.parameters
        lbyl.save(result, tmp_path / "out")
        loaded = lbyl.load(tmp_path / "out", model=fresh)
        assert torch.equal(loaded(x), slim)
        assert str(loaded) == str(result.model)
    loss = result.model(x).square().mean()
    torch.autograd.backward(loss)
    trained = [p for p in result.model.parameters() if p.grad is not None and bool(p.grad.any())]
    assert len(trained) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_pruned_changes_nothing(kind: str) -> None:
    model, x = block(kind)
    result = lbyl.compress(model, x, dict.fromkeys(ALL, 0.0))
    assert torch.equal(result.model(x), model(x))
    assert result.model.state_dict().keys() == model.state_dict().keys()


def test_heads_are_cut_for_good_unless_the_code_has_sizes_written_into_it() -> None:
    model, x = block("kernel")
    result = lbyl.compress(model, x, {"*:heads": 0.3}, method="none", criterion="l2")
    attention = result.model.attention
    assert isinstance(attention, Kernel) and type(attention.q) is nn.Linear
    assert (attention.num_heads, attention.head_dim) == (2, SIZE)
    assert attention.q.out_features == attention.out.in_features == 2 * SIZE
    model, x = block("written")
    result = lbyl.compress(model, x, {"*:heads": 0.3}, method="none", criterion="l2")
    qkv = result.model.attention.qkv
    assert result.graph.units[0].masked
    assert qkv.out_features == 3 * 2 * SIZE and f"of {3 * HEADS * SIZE} outputs" in repr(qkv)


def test_torchs_attention_becomes_a_slim_one_of_its_class() -> None:
    model, x = block("torch")
    ratios = {"*:heads": 0.3, "*:qk": 0.5, "*:v": 0.25}
    result = lbyl.compress(model, x, ratios, method="none", criterion="l2")
    attention = result.model.attention.attention
    assert (attention.num_heads, attention.head_dim) == (2, 2)
    assert attention.in_proj_weight.shape[0] == 2 * (2 + 2 + 3)
    assert attention.out_proj.in_features == 2 * 3


def test_attention_is_pruned_where_it_is_asked_for_by_a_pattern_that_fits() -> None:
    model, x = block("kernel")
    assert not [unit for unit in lbyl.trace(model, x) if unit.kind != "channels"]
    graph = lbyl.trace(model, x, include=ALL, exclude="*:qk")
    assert [unit.kind for unit in graph] == ["heads", "v"]
    with pytest.raises(lbyl.LbylError, match="fits no attention"):
        lbyl.trace(model, x, include="*:head")


def test_normalised_queries_go_by_whole_heads() -> None:
    class Normed(Kernel):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (*x.shape[:2], self.num_heads, self.head_dim)
            q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
            y = nn.functional.scaled_dot_product_attention(self.norm(q), k, v)
            return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))

    model = Normed().double()
    graph = lbyl.trace(model, torch.randn(2, 5, 12).double(), include=ALL)
    assert [unit.kind for unit in graph] == ["heads", "v"]
    assert "zeros" in graph.unprunable[":qk"]


def test_layers_of_torchs_encoder_are_cut_exactly_and_alike_within_a_uniform_budget() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval()
    with torch.no_grad():
        for i, each in enumerate(model.layers):
            each.linear2.weight *= 3.0**i
    x = torch.randn(16, 5, 12).double()
    prepared = lbyl.prepare(model, x, include=["*", "*:heads", "*:qk"], data=x)
    result = prepared.compress(lbyl.Budget(params=0.8, uniform=True))
    widths = [len(k) for n, k in result.plan.kept.items() if n.endswith("linear1")]
    assert len(widths) == 3 and len(set(widths)) == 1
    assert result.after.parameters <= 0.8 * result.before.parameters
    with torch.no_grad():
        cut = prepared.compress(result.plan, method="none").model
        wanted = silenced(model, prepared.graph, result.plan.kept)(x)
        assert torch.allclose(cut(x), wanted, atol=1e-12)
    with pytest.raises(lbyl.LbylError, match="uniform"):
        lbyl.Budget(params=0.8, uniform=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["far", "twice", "fewer", "sizes"])
def test_a_layout_that_cannot_be_is_refused(change: str, tmp_path: Path) -> None:
    model, x = block("torch" if change == "sizes" else "written")
    fresh = copy.deepcopy(model)
    lbyl.save(lbyl.compress(model, x, {"*:qk": 0.5}, method="none", criterion="l2"), tmp_path)
    path = tmp_path / "model.safetensors"
    values = load_file(path)
    name = next(n for n, v in values.items() if not v.is_floating_point())
    old = values[name]
    values[name] = {
        "far": torch.cat([old[:-2], old[-1:] + 5, old[-1:]]),
        "twice": torch.cat([old[:1], old[:1], old[2:]]),
        "fewer": old[1:],
        "sizes": old + 1,
    }[change]
    save_file({n: v.contiguous() for n, v in values.items()}, path, {"format": "pt"})
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(lbyl.LbylError, match="damaged"):
        lbyl.load(tmp_path, model=fresh)
    assert all(torch.equal(v, before[n]) for n, v in fresh.state_dict().items())


def test_single_query_heads_go_where_several_share_keys_and_values(tmp_path: Path) -> None:
    model, x = block("rotary")
    fresh = copy.deepcopy(model)
    prepared = lbyl.prepare(model, x, include="*:queries", data=x)
    (unit,) = prepared.graph
    assert (unit.name, unit.channels) == ("attention:queries", 4)
    assert [p.name for p in unit.producers] == ["attention.q"]
    plan = lbyl.Plan({unit.name: torch.tensor([0, 2, 3])}, {unit.name: 4})
    with torch.no_grad():
        cut = prepared.compress(plan, method="none").model
        quiet = copy.deepcopy(model)
        quiet.get_parameter("attention.out.weight")[:, SIZE : 2 * SIZE] = 0
        assert torch.allclose(cut(x), quiet(x), atol=1e-12)
        assert not torch.allclose(cut(x), model(x), atol=1e-3)
        assert cut.get_parameter("attention.q.weight").shape[0] == 3 * SIZE
        assert cut.get_parameter("attention.k.weight").shape[0] == 2 * SIZE
        restored = prepared.compress(plan)
        off, bare = ((m(x) - model(x)).square().mean() for m in (restored.model, cut))
        assert off < 0.9 * bare
        lbyl.save(restored, tmp_path / "out")
        assert torch.equal(lbyl.load(tmp_path / "out", model=fresh)(x), restored.model(x))


def test_query_heads_are_offered_instead_of_whole_heads_and_only_where_keys_are_shared() -> None:
    model, x = block("rotary")
    assert lbyl.trace(model, x, include="*:*").names == [f"attention:{u}" for u in UNITS]
    both = ["*:queries", "*:qk", "*:v"]
    result = lbyl.compress(model, x, {"*:queries": 0.25, "*:qk": 0.5, "*:v": 0.5}, data=x)
    assert result.graph.names == [f"attention:{u}" for u in ("qk", "v", "queries")]
    assert bool(result.model(x).isfinite().all())
    plain, y = block("kernel")
    reason = lbyl.trace(plain, y, include=both).unprunable["attention:queries"]
    assert reason == "no heads share keys and values: see :heads"
