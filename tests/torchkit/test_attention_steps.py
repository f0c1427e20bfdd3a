"""Attention in single steps computes what torch's own does; damaged layouts are refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import lbyl
from lbyl.torchkit.attention import SIZES, SlimMultiheadAttention
from lbyl.torchkit.intercept import Function, Interceptor
from support.attention import block


class Counting(Interceptor):
    """Counts the calls of linear layers."""

    layers = 0

    def on_call(
        self, func: Function, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        self.layers += func is F.linear
        return func(*args, **kwargs)


MASKS = {
    "none": {},
    "boolean": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "added": {"attn_mask": torch.randn(5, 5).double()},
    "by head": {"attn_mask": torch.randn(6, 5, 5).double()},
    "padding": {"key_padding_mask": torch.tensor([[False] * 4 + [True], [False] * 5])},
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_single_steps_compute_the_same(mask: str, weights: bool, batched: bool) -> None:
    torch.manual_seed(0)
    given = dict(MASKS[mask])
    if not batched and mask in ("padding", "by head"):
        given = {name: x[:3] if mask == "by head" else x[0] for name, x in given.items()}
    attention = nn.MultiheadAttention(12, 3).double().eval()
    x = torch.randn(5, 2, 12).double() if batched else torch.randn(5, 12).double()
    whole = attention(x, x, x, need_weights=weights, **given)
    with Counting() as counting:
        steps = attention(x, x, x, need_weights=weights, **given)
    assert counting.layers == 2  # all three projections at once, and that of the output
    slim = copy.deepcopy(attention)
    SlimMultiheadAttention.of(slim, torch.tensor([3, 4, 4, 4]))
    for out, told in (steps, slim(x, x, x, need_weights=weights, **given)):
        assert torch.allclose(out, whole[0], atol=1e-12)
        assert (told is None) == (whole[1] is None)
        assert told is None or torch.allclose(told, whole[1], atol=1e-12)


@pytest.mark.parametrize("change", ["far", "twice", "fewer", "sizes"])
def test_a_layout_that_cannot_be_is_refused(change: str, tmp_path: Path) -> None:
    kind = "torch" if change == "sizes" else "written"
    model, x = block(kind)
    fresh = copy.deepcopy(model)
    lbyl.save(lbyl.compress(model, x, {"*:qk": 0.5}, method="none", criterion="l2"), tmp_path)
    path = tmp_path / "model.safetensors"
    values = load_file(path)
    name = next(n for n in values if n.endswith((SIZES, "kept_outputs")))
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


def test_layers_of_one_kind_are_cut_alike_within_a_uniform_budget() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for i, each in enumerate(model.layers):
            each.linear2.weight *= 3.0**i
    x = torch.randn(16, 5, 12)
    budget = lbyl.Budget(params=0.8, uniform=True)
    result = lbyl.compress(model, x, budget, include=["*", "*:qk"], data=x)
    widths = [len(k) for n, k in result.plan.kept.items() if n.endswith("linear1")]
    assert len(widths) == 3 and len(set(widths)) == 1
    assert result.after.parameters <= 0.8 * result.before.parameters
    with pytest.raises(lbyl.LbylError, match="uniform"):
        lbyl.Budget(params=0.8, uniform=1)  # type: ignore[arg-type]


def test_fewer_heads_are_said_by_the_configuration() -> None:
    hf = pytest.importorskip("transformers")
    from lbyl.configs import described

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 99}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval()
    x = torch.randint(99, (2, 7))
    result = lbyl.compress(model, x, {"*:heads": 0.5}, method="none", criterion="l2")
    built = described(result.model, result.plan, x)
    assert built is not None
    assert (built.config.num_attention_heads, built.config.num_key_value_heads) == (2, 1)
