"""Accuracy kept beside equal answers, for the map from one to the other.

    python -m benchmarks.forecast --out ROWS.jsonl
    python -m benchmarks.forecast_fit ROWS.jsonl       # the map that ships, fitted again

It prunes every network in many ways and notes, beside the true accuracy on test images, the
fraction of answers that equal the original's, on held-out synthetic inputs and on the test images.
Rows are stored as they come, and what is stored is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import small_networks
from benchmarks.common.environment import default_device, environment, shared_dir
from benchmarks.common.networks import (
    Case,
    LabelledImages,
    criterion_for,
    is_large,
    load_case,
    load_images,
)
from benchmarks.small_networks import LIKE
from lbyl.app.sources import Network, zoo
from lbyl.inputs.batches import FreshInputs

NETWORKS = (
    "digits",
    "lenet300_100_fashionmnist",
    "resnet20_cifar10",
    "resnet56_cifar10",
    "vgg16_cifar10",
    "resnet50_cifar100",
    "vit_cifar100",
    "mobilenet_v2_imagenet",
    "efficientnet_lite0_imagenet",
)
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
METHODS = {
    "l2": ("none", "neuron-merging", "fold", "moments", "echo"),
    "echo": ("none", "neuron-merging", "moments", "echo"),
    "random": ("none", "echo"),
}
REFINED = (0.3, 0.5)  # ratios at which `echo` is also refined, after `l2`
STEPS = 50
INPUTS, SEED = 1024, 20_000  # synthetic ones that networks are compared on; a quarter at 224 px


@dataclass(frozen=True)
class Setting:
    """One way of pruning a network."""

    ratio: float
    criterion: str | None
    method: str
    refine: int = 0

    @property
    def key(self) -> str:
        refined = f"+{self.refine}" if self.refine else ""
        return f"{self.method}{refined}/{self.criterion}/{self.ratio:g}"


def settings(refined: bool = True, ratios: Sequence[float] = RATIOS) -> Iterator[Setting]:
    """All ways, the smallest ratio first."""
    for ratio in ratios:
        for criterion, methods in METHODS.items():
            for method in methods:
                yield Setting(ratio, criterion_for(method, criterion), method)
        if ratio in REFINED and refined:
            yield Setting(ratio, "l2", "echo", STEPS)


def load(name: str, device: str, limit: int | None, trained: Path) -> Case:
    """A network of the zoo, of `benchmarks.small_networks` or the Vision Transformer."""
    if name in small_networks.NETWORKS:
        network = small_networks.load_trained(name, trained, device)
        return Case(name, network, LabelledImages.of(load_images(LIKE), network, limit))
    if name != "vit_cifar100" or name in zoo.names():
        case = load_case(name, device, limit)
        case.include = "*"
        return case
    from torchvision.models import VisionTransformer

    sizes = {"image_size": 32, "patch_size": 4, "num_layers": 8, "num_heads": 6}
    model = VisionTransformer(**sizes, hidden_dim=192, mlp_dim=768, num_classes=100)
    zoo.load_weights(model, shared_dir() / "models" / "vit_cifar100.safetensors")
    known = zoo.info(LIKE)
    example = torch.zeros(1, 3, 32, 32)
    network = Network(name, model.eval(), example, (3, 32, 32), known.mean, known.std).to(device)
    test = LabelledImages.of(load_images(LIKE), network, limit)
    return Case(name, network, test)


@torch.inference_mode()
def _answers(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    return torch.cat([model(images).argmax(1) for images in batches])


def agreement(one: Tensor, other: Tensor) -> float:
    return round(float((one == other).double().mean()), 6)


def measure(name: str, options: argparse.Namespace, known: set[str]) -> Iterator[dict[str, Any]]:
    """A row for every setting of a network that is not known yet."""
    wanted = [
        s
        for s in settings(not options.closed, options.ratios or RATIOS)
        if f"{name} {s.key}" not in known
    ]
    if not wanted:
        return
    case = load(name, options.device, options.limit, options.trained)
    model, images = case.network.model, [x for x, _ in case.test.batches]
    part = 4 if is_large(case.network) else 1
    synthetic = FreshInputs(model, case.network.example, seed=SEED)
    drawn = list(synthetic.collection(options.inputs // part).batches)
    real, fresh = _answers(model, images), _answers(model, drawn)
    labels = torch.cat([y for _, y in case.test.batches])
    base = float((real == labels).double().mean())
    print(name, f"base {base:.4f}", flush=True)
    for setting in wanted:
        if options.minutes and time.perf_counter() > options.until:
            return
        start = time.perf_counter()
        row: dict[str, Any] = {"network": name, "key": setting.key}
        result = case.prepared().compress(
            {"*": setting.ratio},
            criterion=setting.criterion,
            method=setting.method,
            refine=setting.refine,
        )
        now = _answers(result.model, images)
        row |= {"base": base, "accuracy": float((now == labels).double().mean())}
        row |= {"images": len(case.test), "agreement": agreement(now, real)}
        row |= {"fresh": agreement(_answers(result.model, drawn), fresh)}
        yield row | {"seconds": round(time.perf_counter() - start, 2)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows stored so far, the last of each setting; a line that was cut off is left out."""
    rows = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "network" in row:
            rows[f"{row['network']} {row['key']}"] = row
    return list(rows.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument(
        "--out", type=Path, default=Path("forecast.jsonl"), help="rows, a line each"
    )
    parser.add_argument("--trained", type=Path, default=Path("trained"), help="small networks")
    parser.add_argument("--closed", action="store_true", help="no refinement")
    parser.add_argument("--ratios", nargs="*", type=float, help="these only")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="synthetic, at 32 pixels")
    parser.add_argument("--minutes", type=float, help="stop after so many; go on by a second call")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    options.until = time.perf_counter() + 60 * (options.minutes or 0)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = {f"{row['network']} {row['key']}" for row in read_rows(options.out)}
    with options.out.open("a") as file:
        file.write(json.dumps({"environment": environment()}) + "\n")
        for name in options.networks.split(","):
            for row in measure(name, options, known):
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)


if __name__ == "__main__":
    main()
