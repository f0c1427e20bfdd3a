"""How long tracing takes, in seconds of processor on one thread; weights are random.

    python -m benchmarks.tracing_speed [--device cuda] [resnet50 rtdetr sam unet yolov9c]

The least of several traces counts, and beside it that of three plain passes. With `--device` the
clock counts, and the first and the longest of ten are told too. RT-DETR and SAM need Transformers,
UNet2DCondition Diffusers, YOLOv9 Ultralytics; what is not installed is left out. Nothing but
`lbyl.trace` is used, so that the package of an older version can be put in front:
`PYTHONPATH=OLD/src:. python -m …`.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import lbyl

Made = tuple[nn.Module, Any]
Clock = Callable[[], float]


def resnet(name: str) -> Made:
    models = importlib.import_module("torchvision.models")
    return models.get_model(name), torch.zeros(1, 3, 224, 224)


def rtdetr() -> Made:
    transformers = importlib.import_module("transformers")
    model = transformers.RTDetrForObjectDetection(transformers.RTDetrConfig())
    return model, {"pixel_values": torch.zeros(1, 3, 320, 320)}


def sam() -> Made:
    transformers = importlib.import_module("transformers")
    vision = transformers.SamVisionConfig(
        image_size=256,
        hidden_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        global_attn_indexes=[2, 5],
        mlp_dim=384,
    )
    prompt = transformers.SamPromptEncoderConfig(image_size=256)
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt)
    config.prompt_encoder_config.image_embedding_size = 16
    points = torch.zeros(1, 1, 1, 2)
    inputs = {"pixel_values": torch.zeros(1, 3, 256, 256), "input_points": points}
    return transformers.SamModel(config), inputs


def unet() -> Made:
    diffusers = importlib.import_module("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128, 256, 256), cross_attention_dim=64
    )
    text = torch.zeros(1, 7, 64)
    inputs = {"sample": torch.zeros(1, 4, 32, 32), "timestep": torch.tensor([1])}
    return model, {**inputs, "encoder_hidden_states": text}


def yolo() -> Made:
    ultralytics = importlib.import_module("ultralytics")
    return ultralytics.YOLO("yolov9c.yaml").model, torch.zeros(1, 3, 320, 320)


NETWORKS: dict[str, Callable[[], Made]] = {
    "resnet50": lambda: resnet("resnet50"),
    "resnet101": lambda: resnet("resnet101"),
    "rtdetr": rtdetr,
    "sam": sam,
    "unet": unet,
    "yolov9c": yolo,
}


def seconds(model: nn.Module, inputs: Any, clock: Clock, runs: int) -> tuple[int, list[float]]:
    """Units found, and how long each of a few traces took."""
    taken = []
    trace = lbyl.trace  # which imports what it needs
    for _ in range(runs):
        start = clock()
        graph = trace(model.eval(), inputs)
        taken.append(clock() - start)
    return len(graph.units), taken


def moved(inputs: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(device), inputs)


@torch.no_grad()
def plain_pass(model: nn.Module, inputs: Any, runs: int = 3) -> float:
    """Seconds of a pass, the least of a few."""
    taken = []
    for _ in range(runs):
        start = time.process_time()
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *NETWORKS])
    parser.add_argument("--device")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.names or NETWORKS:
        torch.manual_seed(0)
        try:
            made = NETWORKS[name]()
        except ImportError as error:
            print(f"{name}: left out ({error})")
            continue
        if asked.device is None:
            units, taken = seconds(*made, time.process_time, 3)
            plain = plain_pass(*made)
            print(
                f"{name}: {units} units, {min(taken):.2f} s; a plain pass {plain:.3f} s", flush=True
            )
            continue
        model, inputs = made[0].to(asked.device), moved(made[1], asked.device)
        units, taken = seconds(model, inputs, time.perf_counter, 10)
        told = f"{min(taken):.3f} s, the first {taken[0]:.3f}, the longest {max(taken):.3f}"
        print(f"{name} on {asked.device}: {units} units, {told}", flush=True)


if __name__ == "__main__":
    main()
