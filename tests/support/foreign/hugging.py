"""Architectures of Transformers, each with a configuration of a few channels."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from support.architectures import OWN, SIZES
from support.published import Build

MORE: dict[str, Any] = {
    "encoder_hidden_size": 32,
    "decoder_hidden_size": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "decoder_num_hidden_layers": 2,
    "decoder_intermediate_size": 64,
    "depth": 2,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 16, 24, 32],
    "projection_dim": 16,
    "num_blocks": 2,
    "state_size": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_d_state": 4,
    "mamba_expand": 2,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "lru_width": 32,
    "attention_hidden_size": 32,
    "d_inner": 64,
    "max_seq_len": 64,
    "codebook_size": 32,
    "num_queries": 5,
    "vision_feature_layer": -1,
    "global_attn_every_n_layers": 2,
    "sliding_window": 8,
    "conv_dim": [16, 16, 16],
    "conv_stride": [4, 2, 2],
    "conv_kernel": [8, 4, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
SMALLER: dict[str, dict[str, Any]] = {
    "layoutlmv3": {"input_size": 32, "patch_size": 8, "coordinate_size": 6, "shape_size": 4},
    "vits": {"upsample_initial_channel": 32, "flow_size": 32, "spectrogram_bins": 33},
}
NAMES = {
    "text": """
gpt-sw3 afmoe albert apertus arcee aria aria_text audioflamingo3 aya_vision bailing_hybrid bamba
bart beam bert-generation big_bird bigbird_pegasus biogpt bitnet bloom camembert canine
clip_text_model codegen cohere cohere2 cohere2_moe cohere2_vision convbert cosmos3_omni cpmant
ctrl cwm data2vec-text deberta deberta-v2 deepseek_v4 deepseek_vl deepseek_vl_hybrid diffllama
doge dpr ernie ernie4_5 ernie4_5_moe esm eurobert exaone4 exaone4_5 exaone_moe falcon falcon_mamba
fastspeech2_conformer flaubert flava flex_olmo flint fnet fsmt fuyu gemma2 gemma3 gemma3_text git
glm glm4 glm4_moe glmasr got_ocr2 gpt_bigcode gpt_neo gpt_neox_japanese gpt_oss gptj granite
granite_docling_text granite_speech granite_speech_plus granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared gte helium higgs_audio_v2 hrm_text hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 ibert idefics2 idefics3 imagegpt
inkling2_text inkling_mm_model inkling_text internlm3 internvl iquestcoder jais2 jamba jetmoe
jina_embeddings_v3 kimi_linear kolibri1 kosmos-2.5 laguna layoutlm led lfm2 lfm2_vl lfm3
lighton_ocr llama4 llama4_text llava llava_next llava_next_video llava_onevision longformer mamba
markuplm mbart megatron-bert mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl
minimax_m3_vl_text ministral ministral3 mistral3 mixtral mllama mobilebert modernbert
modernbert-decoder modernvbert molmo2_text moshi moss_transcribe_diarize mpnet mpt mra
muse_glimmer_text muse_spark_text musicflamingo mvp nanochat nemotron nemotron_h nomic_bert
nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt openai_privacy_filter ovis2 paligemma
persimmon phi phi4_multimodal phimoe plbart qianfan_ocr qwen2_audio qwen2_moe qwen3
qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl
qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma rembert
roberta-prelayernorm roc_bert roformer rwkv sam3_lite_text_text_model seed_oss smollm3 smolvlm
solar_open splinter squeezebert stablelm starcoder2 step3p7 tapas tipsv2 tipsv2_text_model
ultrabert ultravbert unlimited_ocr vaultgemma video_llama_3 video_llava vipllava visual_bert vits
voxtral xglm xlm xlm-roberta xlm-roberta-xl xmod yoso
""",
    "pair": """
blenderbot blenderbot-small longt5 m2m_100 marian mt5 nllb-moe pegasus pegasus_x
switch_transformers t5gemma t5gemma2 umt5
""",
    "image16": """
aimv2_vision_model beit chinese_clip_vision_model clip_vision_model cvt data2vec-vision deit
dinov2 dinov2_with_registers dinov3_vit dpt focalnet granite_docling_vision hgnet_v2
idefics3_vision ijepa internvl_vision mlcd_vision_model mobilenet_v1 mobilenet_v2 mobilevit pixio
pixtral poolformer qianfan_ocr_vision radio regnet resnet rf_detr sam3_vision_model sam3_vit_model
sam_hq_vision_model sam_vision_model sapiens2 siglip_vision_model smolvlm_vision swiftformer
tipsv2_vision_model vit vit_mae vit_msn vitdet yolos mlcd
""",
    "image64": """
dinov3_convnext pp_ocrv6_small_rec pp_ocrv6_tiny_rec segformer
""",
    "document": "layoutlmv3",
    "image224": """
hiera mobilevitv2 pp_ocrv5_mobile_rec pp_ocrv5_server_rec
""",
    "both": """
aimv2 altclip blip chinese_clip clip clipseg metaclip_2 owlv2 owlvit siglip vilt
vision-text-dual-encoder
""",
    "wave": """
data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm
""",
    "wave1": """
dac encodec pe_audio_encoder mimi_encoder pocket_tts_audio_tokenizer_encoder
""",
    "features": """
gemma4_audio glmasr_encoder moss_transcribe_diarize_audio qwen2_audio_encoder voxtral_encoder
voxtral_realtime_encoder
""",
    "features2": """
lasr_ctc lasr_encoder nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio
nemotron_asr_streaming_encoder parakeet_ctc parakeet_encoder univnet
""",
    "featpair": """
whisper
""",
    "featpair2": """
canary cohere_asr nemotron3_5_asr nemotron_asr_streaming parakeet_rnnt parakeet_tdt
""",
    "video": """
timesformer
""",
}


def _inputs() -> dict[str, dict[str, Tensor]]:
    """What a model is called with, by kind."""
    ids = torch.randint(4, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    return {
        "text": {"input_ids": ids},
        "pair": {"input_ids": ids, "decoder_input_ids": ids[:, :8]},
        "image16": {"pixel_values": torch.randn(2, 3, 16, 16)},
        "image64": {"pixel_values": torch.randn(2, 3, 64, 64)},
        "image224": {"pixel_values": torch.randn(1, 3, 224, 224)},
        "document": {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)},
        "both": {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)},
        "wave": {"input_values": torch.randn(2, 2000)},
        "wave1": {"input_values": torch.randn(2, 1, 2000)},
        "features": {"input_features": torch.randn(2, 8, 128)},
        "features2": {"input_features": torch.randn(2, 128, 8)},
        "featpair": {"input_features": torch.randn(2, 8, 128), "decoder_input_ids": ids[:, :8]},
        "featpair2": {"input_features": torch.randn(2, 128, 8), "decoder_input_ids": ids[:, :8]},
        "video": {"pixel_values": torch.randn(1, 8, 3, 16, 16)},
    }


def sized(name: str, kind: Any) -> Any:
    """A configuration with small numbers wherever it knows them, those inside it too."""
    default = kind()
    known = inspect.signature(kind.__init__).parameters
    given = {
        key: value
        for key, value in {**SIZES, **MORE}.items()
        if (key in known or hasattr(default, key))
        and isinstance(getattr(default, key, None), (list, tuple)) == isinstance(value, list)
    }
    for settled in ("num_key_value_heads", "head_dim"):  # where they are said, not derived
        if settled not in known:
            given.pop(settled, None)
    for key in getattr(kind, "sub_configs", None) or {}:
        part = getattr(default, key, None)
        if hasattr(type(part), "model_type"):
            given[key] = sized("", type(part)).to_dict()
    return kind(**{**given, **OWN.get(name, {}), **SMALLER.get(name, {})})


def build(name: str, form: str) -> tuple[nn.Module, Any]:
    """A small network with random weights, and an input of this form."""
    from transformers import CONFIG_MAPPING, AutoModel

    config = sized(name, CONFIG_MAPPING[name])
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return AutoModel.from_config(config), _inputs()[form]


def builds() -> dict[str, Build]:
    return {name: partial(build, name, form) for form in NAMES for name in NAMES[form].split()}
