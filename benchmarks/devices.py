"""How far a processor and a GPU agree, and whether models come back as they came.

    python -m benchmarks.devices

A ResNet-18 whose BatchNorms were given random statistics is compressed by the same plan on both,
once from the same statistics and once from the same images; then on the GPU in every precision, and
with channels innermost. Convolutions are computed in full float32 unless `--tf32` is given.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor, nn

import lbyl
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from benchmarks.speed.loop import randomised
from lbyl.inputs.images.procedural import procedural_images
from lbyl.methods.echo import Echo

SIZE, IMAGES, RATIO = 64, 256, 0.5


def network() -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    return randomised(models.resnet18(num_classes=10))


def weights_apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of a weight, relative to the largest of its tensor."""
    apart = 0.0
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        if a.is_floating_point():
            a, b = a.double().cpu(), b.double().cpu()
            apart = max(apart, float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)))
    return apart


@torch.no_grad()
def outputs_apart(one: nn.Module, other: nn.Module, x: Tensor) -> tuple[float, float]:
    """Of both on the processor: the relative difference of outputs, the share of equal answers."""
    a, b = (copy.deepcopy(m).cpu().eval()(x).double() for m in (one, other))
    equal = (a.argmax(1) == b.argmax(1)).double().mean()
    return float((a - b).norm() / a.norm()), float(equal)


def agreement(device: str) -> list[list[Any]]:
    """Rows of where both began, and how far weights and outputs are apart."""
    model, example = network(), torch.zeros(1, 3, SIZE, SIZE)
    moved, there = copy.deepcopy(model).to(device), example.to(device)
    images = procedural_images(IMAGES, (3, SIZE, SIZE), seed=1, device="cpu")
    prepared = lbyl.prepare(model, example, data=images)
    plan = prepared.plan({"*": RATIO}, criterion="echo")
    known = prepared.statistics()
    given: dict[str, tuple[Any, Any]] = {
        "the same statistics": (known, known.to(device)),
        "the same images": (images, images.to(device)),
    }
    fresh = procedural_images(IMAGES, (3, SIZE, SIZE), seed=2, device="cpu")
    rows = []
    for name, (here, away) in given.items():
        # A second pass would draw images of its own, which are not the same on both.
        method = Echo(correction="mean+variance")
        one = lbyl.compress(model, example, plan, data=here, method=method).model
        other = lbyl.compress(moved, there, plan, data=away, method=method).model
        rows.append([name, weights_apart(one, other), *outputs_apart(one, other, fresh)])
    return rows


def kept(device: str) -> list[list[Any]]:
    """Rows of how a model was given, and how it came back."""
    rows = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            model = network().to(device, dtype).to(memory_format=layout)
            example = torch.zeros(1, 3, SIZE, SIZE, device=device, dtype=dtype)
            slim = lbyl.compress(model, example, RATIO, data=64).model
            weight = slim.get_parameter("layer1.0.conv1.weight")
            same = {p.dtype for p in slim.parameters()} == {dtype}
            there = {p.device for p in slim.parameters()} == {example.device}
            lies = weight.is_contiguous(memory_format=layout)
            rows.append([str(dtype), str(layout), same, there, lies])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="How far a processor and a GPU agree.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tf32", action="store_true", help="let convolutions round their inputs")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = options.tf32
    rows = agreement(options.device)
    columns = ["from", "weights apart", "outputs apart", "equal answers"]
    print_table("A processor and a device", columns, rows)
    back = kept(options.device)
    print_table("As they came", ["precision", "layout", "precision", "device", "layout"], back)
    name = "devices-tf32" if options.tf32 else "devices"
    print("stored in", save_results(name, {"columns": columns, "rows": rows, "back": back}))


if __name__ == "__main__":
    main()
