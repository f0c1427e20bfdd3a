"""Networks of segmentation-models-pytorch: decoder, encoder, settings, size of the picture."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from support.published import Build

FEW = {"decoder_channels": (32, 24, 16, 12, 8)}
ENTRIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unet-resnet18": ("Unet", "resnet18", FEW),
    "unet-scse": (
        "Unet",
        "mobilenet_v2",
        {"decoder_channels": (32, 32, 16, 16, 16), "decoder_attention_type": "scse"},
    ),
    "unet-instance-norm": (
        "Unet",
        "efficientnet-b0",
        {**FEW, "decoder_use_norm": {"type": "instancenorm", "affine": True}},
    ),
    "unet-no-norm": ("Unet", "vgg11", {**FEW, "decoder_use_norm": False}),
    "unet-classes": (
        "Unet",
        "resnet18",
        {**FEW, "classes": 4, "aux_params": {"classes": 3, "dropout": 0.2}},
    ),
    "unet-depth-3": ("Unet", "densenet121", {"encoder_depth": 3, "decoder_channels": (24, 16, 8)}),
    "unet-timm": ("Unet", "tu-regnety_002", FEW),
    "unet-timm-convnext": (
        "Unet",
        "tu-convnext_atto",
        {"encoder_depth": 4, "decoder_channels": (24, 16, 12, 8)},
    ),
    "unet-mit": ("Unet", "mit_b0", FEW),
    "unet-mobileone": ("Unet", "mobileone_s0", FEW),
    "unet-plus-plus": ("UnetPlusPlus", "resnet18", FEW),
    "unet-plus-plus-sk": ("UnetPlusPlus", "timm-skresnet18", FEW),
    "manet": ("MAnet", "resnet18", {**FEW, "decoder_pab_channels": 8}),
    "manet-mobilenet": ("MAnet", "mobilenet_v2", {**FEW, "decoder_pab_channels": 8}),
    "linknet": ("Linknet", "resnet18", {}),
    "linknet-lite": ("Linknet", "timm-tf_efficientnet_lite0", {}),
    "fpn": ("FPN", "mobilenet_v2", {"decoder_pyramid_channels": 32}),
    "fpn-cat": ("FPN", "resnet18", {"decoder_pyramid_channels": 32, "decoder_merge_policy": "cat"}),
    "pspnet": ("PSPNet", "resnet18", {"psp_out_channels": 32}),
    "pan": ("PAN", "resnet18", {}),
    "deeplab": ("DeepLabV3", "resnet18", {"decoder_channels": 32}),
    "deeplab-separable": (
        "DeepLabV3",
        "mobilenet_v2",
        {"decoder_channels": 32, "decoder_aspp_separable": True},
    ),
    "deeplab-plus": ("DeepLabV3Plus", "mobilenet_v2", {"decoder_channels": 32}),
    "upernet": ("UPerNet", "resnet18", {"decoder_channels": 32}),
    "upernet-efficientnet": ("UPerNet", "tu-tf_efficientnetv2_b0", {"decoder_channels": 32}),
    "segformer": ("Segformer", "mit_b0", {"decoder_segmentation_channels": 32}),
    "segformer-resnet": ("Segformer", "resnet18", {"decoder_segmentation_channels": 32}),
    "dpt": (
        "DPT",
        "tu-vit_tiny_patch16_224",
        {
            "dynamic_img_size": True,
            "decoder_intermediate_channels": (16, 16, 24, 24),
            "decoder_fusion_channels": 16,
        },
    ),
}


def build(name: str) -> tuple[nn.Module, Any]:
    """A network with random weights, and a picture of few pixels."""
    import segmentation_models_pytorch as smp

    decoder, encoder, settings = ENTRIES[name]
    model = getattr(smp, decoder)(encoder, encoder_weights=None, **settings)
    size = 128 if decoder == "PAN" else 64
    return model, torch.randn(2, 3, size, size)


def builds() -> dict[str, Build]:
    return {name: partial(build, name) for name in ENTRIES}
