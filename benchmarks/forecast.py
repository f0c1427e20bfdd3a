"""How well agreement with the original, measured without data, tells the accuracy kept.

    python -m benchmarks.forecast --device cuda --out ROWS.jsonl
    python -m benchmarks.forecast_fit ROWS.jsonl       # the map from these rows, and its errors

It prunes every network in many ways and notes, beside the true accuracy on test images, what
can be known without any: how often and how far the answers of the slim network differ from the
original's on painted and on inverted inputs. Rows are stored as they come, and what is stored is
not measured again. `benchmarks.forecast_fit` calibrates the map that ships with the package
(`lbyl/restoring/forecast.py`) on them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
from lbyl.inputs.batches import FreshInputs
from lbyl.inputs.inversion import invert
from lbyl.models import Network, zoo
from lbyl.restoring.divergence import half_sure, outputs
from lbyl.torchkit.run import Inputs

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
PAINTED, INVERTED = 1024, 256  # inputs that networks are compared on; a quarter at 224 px
TEMPERATURES = (0.25, 0.5, 1.0, 2.0)  # times the one at which answers are half sure


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


@dataclass
class Comparison:
    """What is known of a slim network without data: features of its answers beside the original's.

    Every source of inputs, and every way BatchNorm can normalise, gives the same features.
    """

    case: Case
    inverts: bool = True
    inputs: int = PAINTED
    batches: dict[str, list[Inputs]] = field(default_factory=dict)

    @cached_property
    def original(self) -> dict[str, Tensor]:
        return {name: self._answers(self.case.network.model, name) for name in self.ways}

    @cached_property
    def ways(self) -> list[str]:
        """painted, the same by-batch, inverted and inverted to classes; real images for own inputs.

        Inverted ones and normalising by the batch need BatchNorm.
        """
        prepared, model = self.case.prepared(), self.case.network.model
        part = 4 if is_large(self.case.network) else 1
        fresh = FreshInputs(model, self.case.network.example, seed=20_000)
        self.batches["painted"] = list(fresh.collection(self.inputs // part).batches)
        self.batches["real"] = list(self.case.test.unlabelled(self.inputs // part // 2, 64))
        if not prepared.graph.norms:
            return ["painted", "real"]
        if not self.inverts:
            return ["painted", "by-batch", "real"]
        few = list(fresh.collection(INVERTED // part).batches)
        classes = _answer(model, few[:1]).shape[1]
        labels = torch.arange(sum(len(x) for x in few)) % classes
        self.batches["inverted"] = list(invert(model, few))
        self.batches["classes"] = _to_classes(model, few, labels.to(few[0].device))
        return ["painted", "by-batch", "real", "inverted", "classes"]

    def _answers(self, model: nn.Module, way: str) -> Tensor:
        source = "painted" if way == "by-batch" else way
        return _answer(model, self.batches[source], way == "by-batch")

    def features(self, slim: nn.Module) -> dict[str, dict[str, float]]:
        return {way: compared(self.original[way], self._answers(slim, way)) for way in self.ways}


def _answer(model: nn.Module, batches: list[Inputs], by_batch: bool = False) -> Tensor:
    return torch.cat([out[0] for out in outputs(model, batches, by_batch)])


def _to_classes(model: nn.Module, batches: list[Tensor], labels: Tensor) -> list[Tensor]:
    """Batches that the BatchNorms agree with and that are taken for given classes."""
    made, first = [], 0
    for batch in batches:
        part = labels[first : first + len(batch)]
        first += len(batch)
        made += invert(model, [batch], objective=partial(F.cross_entropy, target=part))
    return made


def compared(teacher: Tensor, student: Tensor) -> dict[str, float]:
    """Features of two sets of scores (n, classes) for the same inputs."""
    if not bool(student.isfinite().all()):
        return {"finite": 0.0}
    equal = (teacher.argmax(1) == student.argmax(1)).double()
    top = teacher.topk(2, 1).values
    margin = top[:, 0] - top[:, 1]
    sure = margin >= margin.median()
    scale = half_sure(teacher)
    made: dict[str, Any] = {
        "agreement": equal.mean(),
        "agreement_weighted": (equal * margin).sum() / margin.sum().clamp(min=1e-30),
        "agreement_sure": equal[sure].mean(),
        "agreement_within_5": _within(teacher, student, 5),
        "shared_classes": len(teacher.argmax(1).unique()) / teacher.shape[1],
        "kl_plain": _kl(teacher, student, 1.0),
        "temperature": scale,
        "sure": F.softmax(teacher, 1).amax(1).mean(),
    }
    for factor in TEMPERATURES:
        made[f"kl_{factor:g}"] = _kl(teacher, student, factor * scale)
    t, s = (x - x.mean(1, keepdim=True) for x in (teacher, student))
    made["error"] = (t - s).square().sum() / t.square().sum().clamp(min=1e-30)
    tc, sc = t - t.mean(0), s - s.mean(0)
    made["error_centred"] = (tc - sc).square().sum() / tc.square().sum().clamp(min=1e-30)
    dot = (tc * sc).sum() / (tc.square().sum() * sc.square().sum()).sqrt().clamp(min=1e-30)
    made["correlation"] = dot
    made["slope"] = (tc * sc).sum() / tc.square().sum().clamp(min=1e-30)
    made["correlation_each"] = F.cosine_similarity(tc, sc, 1).mean()
    best_few = teacher.topk(min(5, teacher.shape[1]), 1).indices
    few = [x.gather(1, best_few) for x in (tc, sc)]
    made["correlation_top"] = F.cosine_similarity(few[0].flatten(), few[1].flatten(), 0)
    # Noise in the margin, in units of the margin: what flips answers.
    best = teacher.argmax(1, keepdim=True)
    second = teacher.scatter(1, best, -math.inf).argmax(1, keepdim=True)
    now = (student.gather(1, best) - student.gather(1, second))[:, 0]
    made["margin_noise"] = (now - margin).square().mean().sqrt() / margin.mean().clamp(min=1e-30)
    made["margin_kept"] = now.mean() / margin.mean().clamp(min=1e-30)
    return {name: round(float(value), 6) for name, value in made.items()} | {"finite": 1.0}


def _kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    p, q = (F.log_softmax(x / temperature, 1) for x in (teacher, student))
    return (p.exp() * (p - q)).sum(1).mean()


def _within(teacher: Tensor, student: Tensor, count: int) -> Tensor:
    best = student.topk(min(count, student.shape[1]), 1).indices
    return (best == teacher.argmax(1, keepdim=True)).any(1).double().mean()


def measure(name: str, options: argparse.Namespace, known: set[str]) -> Iterator[dict[str, Any]]:
    """A row for every setting of a network that is not known yet."""
    wanted = [
        s
        for s in settings(not options.painted, options.ratios or RATIOS)
        if f"{name} {s.key}" not in known
    ]
    if not wanted:
        return
    case = load(name, options.device, options.limit, options.trained)
    model, comparison = case.network.model, Comparison(case, not options.painted, options.inputs)
    original = answers(case, model)
    labels = torch.cat([y for _, y in case.test.batches])
    base = float((original == labels).double().mean())
    start = time.perf_counter()
    ways = comparison.original
    print(name, f"base {base:.4f},", list(ways), f"{time.perf_counter() - start:.1f} s", flush=True)
    for setting in wanted:
        if options.minutes and time.perf_counter() > options.until:
            return
        start = time.perf_counter()
        row: dict[str, Any] = {"network": name, "key": setting.key, "ratio": setting.ratio}
        row |= {"criterion": setting.criterion, "method": setting.method, "refine": setting.refine}
        result = case.prepared().compress(
            {"*": setting.ratio},
            criterion=setting.criterion,
            method=setting.method,
            refine=setting.refine,
        )
        now = answers(case, result.model)
        row |= {"base": base, "accuracy": float((now == labels).double().mean())}
        row |= {"images": len(case.test), "agreement": float((now == original).double().mean())}
        row |= {"classes": ways["painted"].shape[1]}
        row |= {"macs": result.after.macs / result.before.macs}
        row["features"] = comparison.features(result.model)
        yield row | {"seconds": round(time.perf_counter() - start, 2)}


@torch.inference_mode()
def answers(case: Case, model: nn.Module) -> Tensor:
    return torch.cat([model(images).argmax(1) for images, _ in case.test.batches])


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
    parser.add_argument("what", nargs="?", choices=("measure",), default="measure")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--limit", type=int, help="test images to use")
    parser.add_argument(
        "--out", type=Path, default=Path("forecast.jsonl"), help="rows, a line each"
    )
    parser.add_argument("--trained", type=Path, default=Path("trained"), help="small networks")
    parser.add_argument("--painted", action="store_true", help="neither inversion nor refinement")
    parser.add_argument("--ratios", nargs="*", type=float, help="these only")
    parser.add_argument("--inputs", type=int, default=PAINTED, help="painted ones, at 32 pixels")
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
                told = row["features"]["painted"].get("agreement")
                print(name, row["key"], f"{row['accuracy']:.4f}", told, row["seconds"], flush=True)


if __name__ == "__main__":
    main()
