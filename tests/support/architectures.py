"""Tiny networks of every architecture of Transformers that is tried, built from configurations."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

SIZES = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "intermediate_size": 64,
    "d_ff": 64,
    "n_inner": 64,
    "hidden_dim": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "vocab_size": 99,
    "image_size": 16,
    "patch_size": 4,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "rotary_dim": 4,
    "ffn_hidden_size": 64,
}
TEXT = """
albert bert bert-generation big_bird biogpt bloom camembert codegen cohere data2vec-text
deberta-v2 distilbert electra ernie esm exaone4 falcon gemma gemma2 glm gpt2 gpt_bigcode gpt_neo
gpt_neox gptj granite helium llama longformer mistral mpnet mpt nemotron olmo olmo2 opt persimmon
phi phi3 qwen2 qwen3 rembert roberta roberta-prelayernorm roformer smollm3 splinter squeezebert
stablelm starcoder2 xglm xlm-roberta xlm-roberta-xl xmod yoso
""".split()
PAIRS = "bart blenderbot-small m2m_100 marian mbart mt5 pegasus plbart t5 umt5".split()
IMAGES = "audio-spectrogram-transformer beit data2vec-vision deit dinov2 dpt ijepa vit".split()
IMAGES += ["vit_msn", "siglip_vision_model", "clip_vision_model"]
OWN: dict[str, dict[str, Any]] = {
    "bert-generation": {"is_decoder": False},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "falcon": {"new_decoder_architecture": False, "multi_query": False, "alibi": False},
    "glm": {"partial_rotary_factor": 1.0},
    "longformer": {"attention_window": [8, 8]},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "xmod": {"default_language": "en_XX"},
    "audio-spectrogram-transformer": {"num_mel_bins": 16, "max_length": 24},
    "gemma2": {"query_pre_attn_scalar": 8},
}
NAMES = [*TEXT, *PAIRS, *IMAGES]


class Last(nn.Module):
    """The first output of a model alone, without what is cached."""

    def __init__(self, inner: nn.Module, image: bool) -> None:
        super().__init__()
        self.inner, self.image = inner, image

    def forward(self, x: torch.Tensor) -> Any:
        if self.image:
            return self.inner(x)[0]
        given: dict[str, torch.Tensor] = {"input_ids": x}
        if getattr(self.inner.config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = x[:, :8]
        return self.inner(**given)[0]


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A tiny network with random weights, and an input for it."""
    from transformers import CONFIG_MAPPING, AutoModel

    kind = CONFIG_MAPPING[name]
    default = kind()
    known = inspect.signature(kind.__init__).parameters
    given = {k: v for k, v in SIZES.items() if k in known or hasattr(default, k)}
    for settled in ("num_key_value_heads", "head_dim"):  # where they are said, not derived
        if settled not in known:
            given.pop(settled, None)
    config = kind(**{**given, **OWN.get(name, {})})
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    if name == "audio-spectrogram-transformer":
        return Last(model.eval(), True), torch.randn(2, 24, 16)
    if name in IMAGES:
        return Last(model.eval(), True), torch.randn(2, 3, 16, 16)
    ids = torch.randint(4, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    return Last(model.eval(), False), ids
