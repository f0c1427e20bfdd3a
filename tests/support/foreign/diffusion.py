"""Networks of diffusers: class, configuration of a few channels, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from support.published import Build

Entry = tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]

x = torch.randn
DOWN = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
DOWN_CROSS = {**DOWN, "cross_attention_dim": 12, "attention_head_dim": 4}
KL = {**DOWN, "down_block_types": ("DownEncoderBlock2D",) * 2}
KL |= {"up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "sample_size": 16}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2}
ROPE = {"axes_dims_rope": (4, 4, 4)}
IDS = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}


def t() -> torch.Tensor:
    return torch.tensor([3.0, 7.0])


def words(width: int) -> torch.Tensor:
    return x(2, 5, width)


def latent(channels: int = 4, size: int = 8) -> torch.Tensor:
    return x(2, channels, size, size)


def video(channels: int = 3, frames: int = 5, size: int = 16) -> torch.Tensor:
    return x(1, channels, frames, size, size)


def flux(**more: Any) -> dict[str, Any]:
    given = {"hidden_states": x(2, 16, 8), "encoder_hidden_states": words(20), "timestep": t()}
    return given | IDS | more


ENTRIES: dict[str, Entry] = {
    "unet": (
        "UNet2DModel",
        {
            **DOWN,
            "sample_size": 16,
            "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {"sample": latent(3, 16), "timestep": 5},
    ),
    "unet-resnet-sampling": (
        "UNet2DModel",
        {
            **DOWN,
            "sample_size": 16,
            "resnet_time_scale_shift": "scale_shift",
            "downsample_type": "resnet",
            "upsample_type": "resnet",
            "num_class_embeds": 3,
            "down_block_types": ("ResnetDownsampleBlock2D", "SkipDownBlock2D")[:1] * 2,
            "up_block_types": ("ResnetUpsampleBlock2D",) * 2,
            "add_attention": False,
        },
        lambda: {"sample": latent(3, 16), "timestep": 5, "class_labels": torch.tensor([0, 2])},
    ),
    "unet-1d": (
        "UNet1DModel",
        {
            "block_out_channels": (16, 32),
            "in_channels": 4,
            "out_channels": 4,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "act_fn": "silu",
            "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"),
            "up_block_types": ("UpResnetBlock1D",),
            "mid_block_type": "MidResTemporalBlock1D",
            "out_block_type": "OutConv1DBlock",
            "norm_num_groups": 4,
        },
        lambda: {"sample": x(2, 4, 16), "timestep": t()},
    ),
    "unet-text": (
        "UNet2DConditionModel",
        {
            **DOWN_CROSS,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        lambda: {"sample": latent(), "timestep": 5, "encoder_hidden_states": words(12)},
    ),
    "unet-text-linear": (
        "UNet2DConditionModel",
        {
            **DOWN_CROSS,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 24 + 16,
            "transformer_layers_per_block": (1, 2),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {
            "sample": latent(),
            "timestep": 5,
            "encoder_hidden_states": words(12),
            "added_cond_kwargs": {"text_embeds": x(2, 16), "time_ids": torch.ones(2, 6)},
        },
    ),
    "unet-text-simple-cross": (
        "UNet2DConditionModel",
        {
            **DOWN_CROSS,
            "down_block_types": ("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"),
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "up_block_types": ("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
        },
        lambda: {"sample": latent(), "timestep": 5, "encoder_hidden_states": words(12)},
    ),
    "unet-3d": (
        "UNet3DConditionModel",
        {
            **DOWN_CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        lambda: {"sample": video(4, 4, 8), "timestep": 5, "encoder_hidden_states": x(1, 5, 12)},
    ),
    "unet-space-time": (
        "UNetSpatioTemporalConditionModel",
        {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "num_attention_heads": (2, 2),
            "cross_attention_dim": 12,
            "projection_class_embeddings_input_dim": 24,
            "addition_time_embed_dim": 8,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        },
        lambda: {
            "sample": x(1, 3, 8, 8, 8),
            "timestep": 5,
            "encoder_hidden_states": x(1, 1, 12),
            "added_time_ids": torch.ones(1, 3),
        },
    ),
    "controlnet": (
        "ControlNetModel",
        {
            **DOWN_CROSS,
            "conditioning_embedding_out_channels": (8, 16),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        },
        lambda: {
            "sample": latent(),
            "timestep": 5,
            "encoder_hidden_states": words(12),
            "controlnet_cond": latent(3, 16),
        },
    ),
    "t2i-adapter": (
        "T2IAdapter",
        {"channels": [16, 32], "num_res_blocks": 2, "downscale_factor": 8},
        lambda: {"x": latent(3, 64)},
    ),
    "vae": ("AutoencoderKL", KL, lambda: {"sample": latent(3, 16)}),
    "vae-asymmetric": (
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (16, 32),
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (16, 32),
            "norm_num_groups": 4,
        },
        lambda: {"sample": latent(3, 16), "mask": torch.ones(2, 1, 16, 16)},
    ),
    "vae-tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16, 16),
            "decoder_block_out_channels": (16, 16, 16),
            "num_encoder_blocks": (1, 2, 1),
            "num_decoder_blocks": (1, 2, 1),
        },
        lambda: {"sample": latent(3, 16)},
    ),
    "vae-temporal-decoder": (
        "AutoencoderKLTemporalDecoder",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "layers_per_block": 1,
        },
        lambda: {"sample": x(3, 3, 16, 16), "num_frames": 3},
    ),
    "vae-flux2": (
        "AutoencoderKLFlux2",
        {**KL, "sample_size": 16},
        lambda: {"sample": latent(3, 16)},
    ),
    "vae-dc": (
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 2,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "downsample_block_type": "conv",
            "upsample_block_type": "interpolate",
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
        },
        lambda: {"sample": latent(3, 32)},
    ),
    "vae-oobleck": (
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "channel_multiples": [1, 2],
        },
        lambda: {"sample": x(2, 2, 64)},
    ),
    "vae-cogvideox": (
        "AutoencoderKLCogVideoX",
        {
            "block_out_channels": (8, 8, 16, 16),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
        lambda: {"sample": video(3, 5, 16)},
    ),
    "vae-wan": (
        "AutoencoderKLWan",
        {
            "base_dim": 8,
            "z_dim": 16,
            "dim_mult": [1, 1, 2, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
        },
        lambda: {"sample": video(3, 5, 16)},
    ),
    "vae-qwen-image": (
        "AutoencoderKLQwenImage",
        {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1},
        lambda: {"sample": video(3, 1, 16)},
    ),
    "vae-magvit": (
        "AutoencoderKLMagvit",
        {
            "block_out_channels": [8, 8, 16, 16],
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
        lambda: {"sample": video(3, 5, 16)},
    ),
    "vq": (
        "VQModel",
        {**KL, "num_vq_embeddings": 16, "latent_channels": 3},
        lambda: {"sample": latent(3, 16)},
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**HEADS, "sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
        lambda: {
            "hidden_states": latent(),
            "timestep": torch.tensor([1, 4]),
            "class_labels": torch.tensor([2, 5]),
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**HEADS, "sample_size": 8, "cross_attention_dim": 24, "caption_channels": 12},
        lambda: {
            "hidden_states": latent(),
            "timestep": torch.tensor([1, 4]),
            "encoder_hidden_states": words(12),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "joint_attention_dim": 20,
            "caption_projection_dim": 24,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        lambda: {
            "hidden_states": latent(),
            "encoder_hidden_states": words(20),
            "pooled_projections": x(2, 16),
            "timestep": t(),
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            **HEADS,
            **ROPE,
            "in_channels": 8,
            "num_single_layers": 2,
            "joint_attention_dim": 20,
            "pooled_projection_dim": 16,
        },
        lambda: flux(pooled_projections=x(2, 16)),
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {
            **HEADS,
            "axes_dims_rope": (4, 4, 2, 2),
            "in_channels": 8,
            "num_single_layers": 2,
            "joint_attention_dim": 20,
            "timestep_guidance_channels": 16,
            "guidance_embeds": False,
        },
        lambda: flux(img_ids=torch.zeros(16, 4), txt_ids=torch.zeros(5, 4)),
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {
            **HEADS,
            **ROPE,
            "in_channels": 8,
            "num_single_layers": 2,
            "joint_attention_dim": 20,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 2,
        },
        flux,
    ),
    "bria": (
        "BriaTransformer2DModel",
        {**HEADS, **ROPE, "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": 20},
        flux,
    ),
    "ovis-image": (
        "OvisImageTransformer2DModel",
        {
            **HEADS,
            **ROPE,
            "in_channels": 8,
            "out_channels": 8,
            "num_single_layers": 2,
            "joint_attention_dim": 20,
        },
        flux,
    ),
    "longcat-image": (
        "LongCatImageTransformer2DModel",
        {
            **HEADS,
            **ROPE,
            "in_channels": 8,
            "num_single_layers": 2,
            "joint_attention_dim": 20,
            "pooled_projection_dim": 16,
        },
        flux,
    ),
    "aura-flow": (
        "AuraFlowTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 20,
            "caption_projection_dim": 24,
            "pos_embed_max_size": 16,
        },
        lambda: {
            "hidden_states": latent(),
            "encoder_hidden_states": words(20),
            "timestep": t() / 10,
        },
    ),
    "sana": (
        "SanaTransformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 12,
            "sample_size": 8,
        },
        lambda: {
            "hidden_states": latent(),
            "encoder_hidden_states": words(12),
            "timestep": torch.tensor([1, 4]),
        },
    ),
    "prior": (
        "PriorTransformer",
        {**HEADS, "embedding_dim": 12, "num_embeddings": 5, "additional_embeddings": 4},
        lambda: {
            "hidden_states": x(2, 12),
            "timestep": 5,
            "proj_embedding": x(2, 12),
            "encoder_hidden_states": words(12),
        },
    ),
    "cogview4": (
        "CogView4Transformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": 12,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "sample_size": 8,
            "rope_axes_dim": (8, 8),
        },
        lambda: {
            "hidden_states": latent(),
            "encoder_hidden_states": words(12),
            "timestep": t(),
            "original_size": torch.full((2, 2), 8.0),
            "target_size": torch.full((2, 2), 8.0),
            "crop_coords": torch.zeros(2, 2),
        },
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            **HEADS,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 12,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 5,
        },
        lambda: {
            "hidden_states": x(2, 2, 4, 8, 8),
            "encoder_hidden_states": words(12),
            "timestep": t(),
        },
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 32,
            "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": video(4, 2, 8),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": x(1, 5, 12),
        },
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 24,
            "caption_channels": 12,
        },
        lambda: {
            "hidden_states": x(2, 32, 4),
            "encoder_hidden_states": words(12),
            "timestep": t(),
            "encoder_attention_mask": torch.ones(2, 5).bool(),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 12,
        },
        lambda: {
            "hidden_states": latent(),
            "timestep": t() / 10,
            "encoder_hidden_states": words(12),
            "encoder_attention_mask": torch.ones(2, 5).bool(),
        },
    ),
    "qwen-image": (
        "QwenImageTransformer2DModel",
        {**HEADS, **ROPE, "in_channels": 8, "out_channels": 2, "joint_attention_dim": 20},
        lambda: {
            "hidden_states": x(2, 16, 8),
            "encoder_hidden_states": words(20),
            "encoder_hidden_states_mask": torch.ones(2, 5).long(),
            "timestep": t(),
            "img_shapes": [(1, 4, 4)] * 2,
        },
    ),
    "latte": (
        "LatteTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "cross_attention_dim": 24,
            "caption_channels": 12,
            "sample_size": 8,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "video_length": 2,
        },
        lambda: {
            "hidden_states": video(4, 2, 8),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": x(1, 5, 12),
        },
    ),
    "stable-audio": (
        "StableAudioDiTModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 12,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": 12,
            "time_proj_dim": 8,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 12,
        },
        lambda: {
            "hidden_states": x(2, 4, 16),
            "timestep": t(),
            "encoder_hidden_states": words(12),
            "global_hidden_states": x(2, 1, 16),
        },
    ),
    "prx": (
        "PRXTransformer2DModel",
        {
            "in_channels": 4,
            "context_in_dim": 12,
            "hidden_size": 24,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [6, 6],
        },
        lambda: {
            "hidden_states": latent(),
            "timestep": t() / 10,
            "encoder_hidden_states": words(12),
        },
    ),
}


def build(name: str) -> tuple[nn.Module, Any]:
    """A small network with random weights, and inputs for it."""
    import diffusers

    kind, configuration, inputs = ENTRIES[name]
    return getattr(diffusers, kind)(**configuration), inputs()


def builds() -> dict[str, Build]:
    return {name: partial(build, name) for name in ENTRIES}
