"""Networks of MONAI with a few channels, for two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from support.published import Build

Entry = tuple[str, dict[str, Any], Callable[[], Any]]

x = torch.randn
FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 3}
SOLID = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}
STEPS = {"channels": (8, 12, 16), "strides": (2, 2)}
LEVELS = {"channels": (8, 16), "attention_levels": (False, True), "num_res_blocks": 1}
LEVELS |= {"norm_num_groups": 4}
VIT = {"hidden_size": 24, "mlp_dim": 48, "num_layers": 2, "num_heads": 4}
PATCHES = {"in_channels": 1, "img_size": (16, 16), "patch_size": (8, 8), "spatial_dims": 2}
SHAPES = {"in_shape": (1, 16, 16), "channels": (8, 12), "strides": (2, 2)}
DYNAMIC = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
DYNAMIC |= {"filters": [8, 12, 16]}


def flat(size: int = 16, channels: int = 1) -> torch.Tensor:
    return x(2, channels, size, size)


def solid(size: int = 16, channels: int = 1) -> torch.Tensor:
    return x(1, channels, size, size, size)


ENTRIES: dict[str, Entry] = {
    "unet": ("UNet", {**FLAT, **STEPS}, flat),
    "unet-3d-residual": ("UNet", {**SOLID, **STEPS, "num_res_units": 2, "norm": "batch"}, solid),
    "unet-group-norm": (
        "UNet",
        {**FLAT, **STEPS, "out_channels": 4, "norm": ("group", {"num_groups": 4})},
        flat,
    ),
    "attention-unet": ("AttentionUnet", {**FLAT, **STEPS}, flat),
    "autoencoder": (
        "AutoEncoder",
        {**FLAT, "channels": (8, 12), "strides": (2, 2), "inter_channels": [16, 16]},
        flat,
    ),
    "variational-autoencoder": (
        "VarAutoEncoder",
        {
            "spatial_dims": 2,
            "in_shape": (1, 16, 16),
            "out_channels": 1,
            "latent_size": 6,
            "channels": (8, 16),
            "strides": (2, 2),
            "use_mean_at_inference": True,
        },
        flat,
    ),
    "variational-dense": (
        "VarFullyConnectedNet",
        {
            "in_channels": 8,
            "out_channels": 8,
            "latent_size": 4,
            "encode_channels": (16, 12),
            "decode_channels": (12, 16),
            "use_mean_at_inference": True,
        },
        lambda: x(3, 8),
    ),
    "dense": (
        "FullyConnectedNet",
        {"in_channels": 8, "out_channels": 3, "hidden_channels": (16, 24), "dropout": 0.2},
        lambda: x(3, 8),
    ),
    "basic-unet": ("BasicUNet", {**FLAT, "features": (8, 8, 16, 16, 16, 8)}, lambda: flat(32)),
    "basic-unet-3d-batch": (
        "BasicUNet",
        {**SOLID, "features": (4, 4, 8, 8, 8, 4), "norm": "batch", "upsample": "pixelshuffle"},
        solid,
    ),
    "basic-unet-plus-plus": (
        "BasicUNetPlusPlus",
        {**FLAT, "features": (8, 8, 16, 16, 16, 8), "deep_supervision": True},
        lambda: flat(32),
    ),
    "dyn-unet": ("DynUNet", {**FLAT, **DYNAMIC}, flat),
    "dyn-unet-residual": (
        "DynUNet",
        {**SOLID, **DYNAMIC, "res_block": True, "norm_name": "batch"},
        solid,
    ),
    "flexible-unet": (
        "FlexibleUNet",
        {
            "in_channels": 3,
            "out_channels": 2,
            "backbone": "efficientnet-b0",
            "decoder_channels": (32, 24, 16, 12, 8),
        },
        lambda: flat(64, 3),
    ),
    "vnet": ("VNet", {"spatial_dims": 2, "dropout_dim": 2}, lambda: flat(32)),
    "seg-resnet": (
        "SegResNet",
        {**FLAT, "blocks_down": (1, 1, 1), "blocks_up": (1, 1), "upsample_mode": "deconv"},
        flat,
    ),
    "seg-resnet-ds": (
        "SegResNetDS",
        {**FLAT, "init_filters": 8, "blocks_down": (1, 2, 1), "dsdepth": 2},
        flat,
    ),
    "seg-resnet-vae": (
        "SegResNetVAE",
        {
            **FLAT,
            "input_image_size": (16, 16),
            "blocks_down": (1, 1, 1),
            "blocks_up": (1, 1),
            "vae_nz": 8,
        },
        flat,
    ),
    "high-res": (
        "HighResNet",
        {
            **FLAT,
            "layer_params": (
                {"name": "conv_0", "n_features": 8, "kernel_size": 3},
                {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 2},
                {"name": "res_2", "n_features": 16, "kernels": (3, 3), "repeat": 2},
                {"name": "conv_1", "n_features": 20, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1},
            ),
        },
        flat,
    ),
    "quicknat": ("Quicknat", {"num_classes": 3, "num_filters": 8}, lambda: flat(32)),
    "ahnet": (
        "AHNet",
        {"layers": (1, 1, 1, 1), "spatial_dims": 2, "psp_block_num": 0},
        lambda: flat(64),
    ),
    "med-next": (
        "MedNeXt",
        {
            **FLAT,
            "init_filters": 8,
            "kernel_size": 3,
            "blocks_down": (1, 1, 1, 1),
            "blocks_bottleneck": 1,
            "blocks_up": (1, 1, 1, 1),
            "use_residual_connection": True,
        },
        lambda: flat(32),
    ),
    "unetr": (
        "UNETR",
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": (32, 32),
            "feature_size": 8,
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_heads": 4,
            "spatial_dims": 2,
        },
        lambda: flat(32),
    ),
    "swin-unetr": (
        "SwinUNETR",
        {
            "in_channels": 1,
            "out_channels": 2,
            "depths": (1, 1, 1, 1),
            "num_heads": (2, 2, 2, 2),
            "feature_size": 12,
            "window_size": 4,
            "spatial_dims": 2,
        },
        lambda: flat(64),
    ),
    "vit": ("ViT", {**VIT, **PATCHES, "classification": True}, flat),
    "vit-autoencoder": ("ViTAutoEnc", {**VIT, **PATCHES, "patch_size": (4, 4)}, flat),
    "densenet": (
        "DenseNet121",
        {**FLAT, "init_features": 8, "growth_rate": 8, "block_config": (2, 2, 2)},
        lambda: flat(32),
    ),
    "resnet-3d": (
        "resnet10",
        {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 3, "widen_factor": 0.25},
        lambda: x(2, 1, 32, 32, 32),
    ),
    "se-resnet": (
        "SEResNet50",
        {
            "spatial_dims": 2,
            "in_channels": 3,
            "num_classes": 3,
            "layers": (1, 1, 1, 1),
            "inplanes": 16,
        },
        lambda: flat(64, 3),
    ),
    "efficientnet": (
        "EfficientNetBN",
        {"model_name": "efficientnet-b0", "pretrained": False, "num_classes": 3},
        lambda: flat(64, 3),
    ),
    "classifier": ("Classifier", {**SHAPES, "classes": 3}, flat),
    "regressor": ("Regressor", {**SHAPES, "out_shape": (2,)}, flat),
    "critic": ("Critic", SHAPES, flat),
    "discriminator": ("Discriminator", {**SHAPES, "norm": "batch"}, flat),
    "generator": (
        "Generator",
        {
            "latent_shape": (6,),
            "start_shape": (8, 4, 4),
            "channels": (16, 8, 1),
            "strides": (2, 2, 1),
        },
        lambda: x(2, 6),
    ),
    "patch-discriminator": (
        "PatchDiscriminator",
        {**FLAT, "channels": 8, "num_layers_d": 2},
        lambda: flat(32),
    ),
    "vq-vae": (
        "VQVAE",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 1,
            "channels": (8, 16),
            "num_res_channels": (8, 16),
            "num_res_layers": 1,
            "downsample_parameters": ((2, 4, 1, 1),) * 2,
            "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
            "num_embeddings": 8,
            "embedding_dim": 6,
        },
        flat,
    ),
    "diffusion-unet": (
        "DiffusionModelUNet",
        {**FLAT, **LEVELS, "num_head_channels": 4},
        lambda: {"x": flat(), "timesteps": torch.tensor([1, 5])},
    ),
    "diffusion-unet-text": (
        "DiffusionModelUNet",
        {
            **FLAT,
            **LEVELS,
            "num_head_channels": 4,
            "with_conditioning": True,
            "cross_attention_dim": 6,
            "resblock_updown": True,
        },
        lambda: {"x": flat(), "timesteps": torch.tensor([1, 5]), "context": x(2, 3, 6)},
    ),
    "controlnet": (
        "ControlNet",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            **LEVELS,
            "num_head_channels": 4,
            "conditioning_embedding_num_channels": (8, 8),
        },
        lambda: {"x": flat(), "timesteps": torch.tensor([1, 5]), "controlnet_cond": flat(32)},
    ),
    "decoder-only": (
        "DecoderOnlyTransformer",
        {
            "num_tokens": 20,
            "max_seq_len": 16,
            "attn_layers_dim": 24,
            "attn_layers_depth": 2,
            "attn_layers_heads": 4,
        },
        lambda: torch.randint(0, 20, (2, 9)),
    ),
    "voxel-morph-unet": (
        "VoxelMorphUNet",
        {
            "spatial_dims": 2,
            "in_channels": 2,
            "unet_out_channels": 8,
            "channels": (8, 8, 12, 12),
            "final_conv_channels": (8, 8),
        },
        lambda: flat(32, 2),
    ),
    "registration-unet": (
        "RegUNet",
        {"spatial_dims": 2, "in_channels": 2, "num_channel_initial": 8, "depth": 2},
        lambda: flat(16, 2),
    ),
    "local": (
        "LocalNet",
        {"spatial_dims": 2, "in_channels": 2, "num_channel_initial": 8, "extract_levels": (0, 1)},
        lambda: flat(16, 2),
    ),
    "global": (
        "GlobalNet",
        {
            "image_size": [16, 16],
            "spatial_dims": 2,
            "in_channels": 2,
            "num_channel_initial": 8,
            "depth": 2,
        },
        lambda: flat(16, 2),
    ),
    "torchvision-fc": (
        "TorchVisionFCModel",
        {"model_name": "resnet18", "num_classes": 3, "use_conv": True, "pool": None},
        lambda: flat(64, 3),
    ),
}


def build(name: str) -> tuple[nn.Module, Any]:
    """A small network with random weights, and inputs for it."""
    import monai.networks.nets as nets

    kind, settings, inputs = ENTRIES[name]
    return getattr(nets, kind)(**settings), inputs()


def builds() -> dict[str, Build]:
    return {name: partial(build, name) for name in ENTRIES}
