"""Networks to try the library on: torchvision, timm and tiny transformers, all without files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, Any]]
"""Makes a network with weights drawn at random, and example inputs for it."""

SMALL = 64
NATIVE = (("vit_", 224), ("swin", 224), ("maxvit", 224), ("inception", 299), ("alexnet", 96))
VIDEO = ["r3d_18", "r2plus1d_18", "mc3_18", "s3d"]

TIMM = """
beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_lite_tiny convit_tiny convmixer_768_32
convnext_atto convnextv2_atto crossvit_tiny_240 cspresnet50 cspdarknet53 darknet53 davit_tiny
deit_tiny_patch16_224 deit3_small_patch16_224 densenet121 dla34 dpn68 eca_resnet33ts
edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientnet_lite0
efficientvit_b0 efficientvit_m0 ese_vovnet19b_dw eva02_tiny_patch14_224 fasternet_t0 fastvit_t8
fbnetc_100 focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_100 ghostnetv2_100 hardcorenas_a
hgnetv2_b0 hiera_tiny_224 hrnet_w18_small inception_next_atto inception_resnet_v2 inception_v4
lcnet_050 levit_128s mambaout_femto mixer_s32_224 mixnet_s mnasnet_small mobilenetv4_conv_small
mobileone_s0 mobilevit_xxs mobilevitv2_050 mvitv2_tiny nf_resnet26 nest_tiny nextvit_small
pit_ti_224 poolformer_s12 pvt_v2_b0 regnetx_002 regnety_002 repghostnet_050 repvgg_a0 repvit_m0_9
res2net50_26w_4s resmlp_12_224 resnest14d resnet18 resnet50d resnetv2_50 resnext26ts rexnet_100
selecsls42 semnasnet_075 sequencer2d_s skresnet18 starnet_s1 swiftformer_xs
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tf_efficientnetv2_b0 tiny_vit_5m_224
tnt_s_legacy_patch16_224 tresnet_m twins_pcpvt_small vgg11_bn visformer_tiny vit_tiny_patch16_224
vit_relpos_small_patch16_224 volo_d1_224 vovnet39a xception41 xcit_nano_12_p16_224
""".split()

TRANSFORMERS = """
bert roberta distilbert electra gpt2 gpt_neox opt llama mistral qwen2 gemma phi3 t5
""".split()


def torchvision_names() -> list[str]:
    """All of torchvision's networks for classification and segmentation, and some for video."""
    import torchvision.models as zoo

    return [*zoo.list_models(zoo), *zoo.list_models(zoo.segmentation), *VIDEO]


def detector_names() -> list[str]:
    """All of torchvision's detectors."""
    import torchvision.models as zoo

    return list(zoo.list_models(zoo.detection))


def torchvision_build(name: str) -> Build:
    def build() -> tuple[nn.Module, Any]:
        import torchvision.models as zoo

        options: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        if name.startswith(("deeplab", "fcn", "lraspp")):
            options["weights_backbone"] = None
        model = zoo.get_model(name, weights=None, **options)
        if name in VIDEO:
            return model, torch.randn(1, 3, 16, *[224 if name == "s3d" else 64] * 2)
        size = next((s for start, s in NATIVE if name.startswith(start)), SMALL)
        return model, torch.randn(1, 3, size, size)

    return build


def detector_build(name: str) -> Build:
    def build() -> tuple[nn.Module, Any]:
        import torchvision.models as zoo

        options: dict[str, Any] = {"weights": None, "weights_backbone": None}
        if "rcnn" in name or "retina" in name or "fcos" in name:
            options |= {"min_size": 128, "max_size": 128}
        return zoo.get_model(name, **options), ([torch.rand(3, 128, 128)],)

    return build


def timm_build(name: str) -> Build:
    def build() -> tuple[nn.Module, Any]:
        import timm

        model = timm.create_model(name, pretrained=False)
        shape = model.pretrained_cfg["input_size"]
        if not _flexible(model):
            return model, torch.randn(1, *shape)
        return model, torch.randn(1, 3, min(96, shape[1]), min(96, shape[2]))

    return build


def _flexible(model: nn.Module) -> bool:
    """Convolutional networks of timm take images of any size."""
    kinds = {type(m).__name__ for m in model.modules()}
    attends = any("Attention" in k or "Mixer" in k or "Attn" in k for k in kinds)
    return not attends and not model.pretrained_cfg.get("fixed_input_size", False)


class FirstOutput(nn.Module):
    """A Hugging Face model that gives its first output, as a plain tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)[0]


def transformer_build(kind: str) -> Build:
    """Tiny transformers of Hugging Face, built from a configuration."""

    def build() -> tuple[nn.Module, Any]:
        model = _transformer(kind)
        model.config.use_cache = False
        ids = torch.randint(2, 99, (2, 12), generator=torch.Generator().manual_seed(0))
        return FirstOutput(model), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return build


def _transformer(kind: str) -> nn.Module:
    import transformers as hf

    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 40}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, **sizes))
    if kind == "distilbert":
        sizes = {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 64}
        return hf.DistilBertModel(hf.DistilBertConfig(vocab_size=99, **sizes))
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        gate = {"feed_forward_proj": "gated-gelu"}
        return hf.T5EncoderModel(hf.T5Config(vocab_size=99, **sizes, **gate))
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 40}
    own: dict[str, dict[str, int]] = {
        "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
        "gemma": {"num_key_value_heads": 2, "head_dim": 8},
        "phi3": {"pad_token_id": 0},
    }
    own |= {name: {"num_key_value_heads": 2} for name in ("llama", "mistral", "qwen2")}
    config, model = {
        "bert": (hf.BertConfig, hf.BertModel),
        "roberta": (hf.RobertaConfig, hf.RobertaModel),
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM),
        "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM),
        "opt": (hf.OPTConfig, hf.OPTForCausalLM),
        "gpt_neox": (hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM),
        "electra": (hf.ElectraConfig, hf.ElectraModel),
    }[kind]
    return model(config(vocab_size=99, **sizes, **own.get(kind, {})))


def every() -> dict[str, Build]:
    """All networks of the sweep by name."""
    found = {f"torchvision/{n}": torchvision_build(n) for n in torchvision_names()}
    found |= {f"detection/{n}": detector_build(n) for n in detector_names()}
    found |= {f"timm/{n}": timm_build(n) for n in TIMM}
    return found | {f"transformers/{n}": transformer_build(n) for n in TRANSFORMERS}


def stir(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights under which a wrong index would show: nothing constant, nothing zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        for parameter in model.parameters():
            if parameter.dim() < 2 or float(parameter.std()) < 1e-3:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()
