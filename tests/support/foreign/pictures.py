"""Networks of timm and torchvision that `support.published` does not have, most of them small."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from support.published import Build

# timm: size of the picture, 0 for its own.
TIMM = {
    64: """
    test_byobnet test_convnext test_convnext2 test_convnext3 test_efficientnet test_efficientnet_gn
    test_efficientnet_ln test_mambaout test_nfnet test_resnet caformer_s18 convformer_s18
    poolformerv2_s12 cs3darknet_s cs3sedarknet_l cspnext_tiny darknetaa53 dla46_c eca_nfnet_l0
    ecaresnet26t edgenext_x_small efficientnet_es efficientnet_b1_pruned fbnetv3_b gcresnet33ts
    gcresnext26ts ghostnetv3_050 hgnet_tiny hrnet_w18_small_v2 lcnetv2_base mobilenetv1_100
    mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_hybrid_medium nf_regnet_b0 rdnet_tiny
    regnetv_040 regnetz_005 resnet10t resnet14t resnetaa34d resnetblur18 resnetrs50 rexnetr_200
    seresnext26ts seresnet18 spnasnet_100 starnet_s050 tf_mobilenetv3_small_minimal_100
    tinynet_e xception65
    """,
    0: """
    test_vit test_vit2 test_vit3 test_vit4 beitv2_base_patch16_224 coatnet_nano_rw_224
    coatnext_nano_rw_224 efficientvim_m1 flexivit_small gmixer_12_224 gmlp_ti16_224 halonet26t
    lambda_resnet26t lambda_resnet26rpt_256 sebotnet33ts_256 shvit_s1 hieradet_small iformer_t
    lowformer_b0 csatv2 maxxvit_rmlp_nano_rw_256 vit_tiny_r_s16_p8_224
    vit_relpos_small_patch16_rpn_224 resnet51q naflexvit_base_patch16_gap
    """,
}
DEPTH = ("beitv2", "flexivit", "naflexvit")  # of many equal blocks two tell as much
TORCHVISION = {
    "resnet-narrow": ("resnet50", {"width_per_group": 16}),
    "resnet-dilated": ("resnet50", {"replace_stride_with_dilation": [False, True, True]}),
    "mobilenet-quarter": ("mobilenet_v2", {"width_mult": 0.25}),
    "squeezenet-few-classes": ("squeezenet1_1", {"num_classes": 5}),
    "shufflenet-own": ("shufflenet_v2_x0_5", {"num_classes": 7}),
    "vgg-small-head": ("vgg11_bn", {"num_classes": 5}),
    "swin-small-window": ("swin_t", {"num_classes": 3}),
    "raft-small": ("raft_small", {}),
}


def timm_build(name: str, size: int) -> tuple[nn.Module, Any]:
    import timm

    settings = {"depth": 2} if name.startswith(DEPTH) else {}
    model = timm.create_model(name, pretrained=False, **settings)
    shape = model.pretrained_cfg["input_size"]
    return model, torch.randn(2, shape[0], size or shape[1], size or shape[2])


def torchvision_build(name: str) -> tuple[nn.Module, Any]:
    import torchvision.models as zoo

    kind, settings = TORCHVISION[name]
    model = zoo.get_model(kind, weights=None, **settings)
    if kind == "raft_small":
        pictures = torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)
        return model, {"image1": pictures[0], "image2": pictures[1], "num_flow_updates": 2}
    return model, torch.randn(2, 3, 64, 64)


def timm_builds() -> dict[str, Build]:
    return {
        name: partial(timm_build, name, size)
        for size, names in TIMM.items()
        for name in names.split()
    }


def torchvision_builds() -> dict[str, Build]:
    return {name: partial(torchvision_build, name) for name in TORCHVISION}
