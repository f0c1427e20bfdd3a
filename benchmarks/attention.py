"""Attention pruned in a language model and a Vision Transformer: `benchmarks.attention llama`.

Perplexity on the first windows of held-out text, or accuracy on the first test images, with
queries and keys, heads and values cut alone and restored, and a budget over everything. Statistics
come from text that the model wrote itself, or from procedural images; `--real` uses real text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import lbyl
from benchmarks.common.environment import shared_dir
from benchmarks.common.text import (
    calibration_windows,
    language_model,
    measured_windows,
    perplexity,
)

RATIOS = ({"*:qk": 0.5}, {"*:heads": 0.25}, {"*:v": 0.5})
EVERYTHING = ("*", "*:heads", "*:qk", "*:v")
LESS = 0.25  # of the parameters of blocks, by budget


def vision_transformer() -> nn.Module:
    """The Vision Transformer for CIFAR-100 in float32."""
    from safetensors.torch import load_file
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 4, 8, 6, 192, 768, num_classes=100)
    state = load_file(shared_dir() / "models" / "vit_cifar100.safetensors")
    model.load_state_dict({name: x.float() for name, x in state.items()})
    return model.eval()


def test_images(count: int) -> tuple[Tensor, Tensor]:
    """The first test images of CIFAR-100, normalised, and their labels."""
    stored = np.load(shared_dir() / "data" / "cifar100_test.npz")
    images = torch.from_numpy(stored["images"][:count]).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([0.5071, 0.4867, 0.4408]), torch.tensor([0.2675, 0.2565, 0.2761])
    images = (images - mean[:, None, None]) / std[:, None, None]
    return images, torch.from_numpy(stored["labels"][:count]).long()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images that a model names rightly."""
    with torch.no_grad():
        right = [
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(images.split(250), labels.split(250), strict=True)
        ]
    return 100 * sum(right) / len(labels)


def blocks_budget(model: nn.Module, less: float = LESS) -> lbyl.Budget:
    """The budget that leaves out this fraction of the parameters inside blocks."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    blocks = sum(size for name, size in sizes.items() if "layers." in name)
    return lbyl.Budget(params=1 - less * blocks / sum(sizes.values()))


def table(prepared: lbyl.Prepared, measure: Callable[[nn.Module], float], budget: bool) -> None:
    """Print one row for every kind of unit: cut alone by L2 and by echo, and restored."""
    print(f"{'whole':<18} {measure(prepared.model):8.2f}")
    for ratio in RATIOS:
        alone = [
            measure(prepared.compress(ratio, method="none", criterion=c).model)
            for c in ("l2", "echo")
        ]
        restored = measure(prepared.compress(ratio).model)
        name = ", ".join(f"{pattern} {value:.0%}" for pattern, value in ratio.items())
        print(f"{name:<18} {alone[0]:8.2f} {alone[1]:8.2f} {restored:8.2f}", flush=True)
    if budget:
        result = prepared.compress(blocks_budget(prepared.model))
        print(f"{'25% fewer, budget':<18} {measure(result.model):26.2f}  {result.allocation}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("llama", "vit"))
    parser.add_argument("--real", action="store_true", help="real text instead of its own")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--budget", action="store_true")
    given = parser.parse_args()
    if given.network == "vit":
        model, (images, labels) = vision_transformer(), test_images(given.images)
        prepared = lbyl.prepare(model, images[:2], include=EVERYTHING)
        table(prepared, lambda m: accuracy(m, images, labels), given.budget)
        return
    model, windows = language_model(), measured_windows()
    data = list(calibration_windows().split(16)) if given.real else None
    prepared = lbyl.prepare(model, calibration_windows(2), include=EVERYTHING, data=data)
    table(prepared, lambda m: perplexity(m, windows), given.budget)


if __name__ == "__main__":
    main()
