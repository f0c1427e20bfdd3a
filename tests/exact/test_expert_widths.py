"""The stream of a mixture of experts gets widths that its kernels take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lbyl

hf = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}
OWN: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Afmoe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "HunYuanMoEV1": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "Jamba": {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**{**SIZES, **OWN[name]}, use_cache=False)
    model: nn.Module = getattr(hf, f"{name}ForCausalLM")(config)
    return model.eval()


@pytest.mark.parametrize("name", [n for n in OWN if n != "Mixtral"])
@pytest.mark.parametrize("ratio", [0.3, 0.55])
def test_a_narrower_stream_runs_in_the_kernels_of_experts(name: str, ratio: float) -> None:
    if not hasattr(hf, f"{name}Config"):
        pytest.skip(f"this version of Transformers has no {name}")
    model = build(name)
    x = {"input_ids": torch.randint(2, 99, (2, 12))}
    result = lbyl.compress(model, x, {"*": ratio}, residual=True, method="none", criterion="l2")
    with torch.no_grad():
        assert result.model(**x).logits.shape == (2, 12, 99)
    stream = [u for u in result.graph if u.residual]
    assert stream and all(len(result.plan.kept[u.name]) % 4 == 0 for u in stream)
    assert any(u.name in result.plan.pruned for u in stream)


def test_a_network_prepared_by_hand_has_its_experts_apart_too() -> None:
    model = build("Mixtral")
    x = {"input_ids": torch.randint(2, 99, (2, 12))}
    prepared = lbyl.Prepared(model, x, lbyl.trace(model, x))
    result = prepared.compress(0.5, method="none")
    with torch.no_grad():
        assert result.model(**x).logits.shape == (2, 12, 99)
