"""What a restored network is worth as a start: fine-tuning, transfer, and training without data.

    python -m benchmarks.retraining --part finetune   # 20 epochs after each method, or from scratch
    python -m benchmarks.retraining --part transfer   # ratios by layer, a new head, other images
    python -m benchmarks.retraining --part datafree   # seconds and accuracy of ways without data
    (each with --small for minutes on two cores; --jobs N runs N settings at once on one GPU)

Every setting is stored when it is finished; the same command again does what is missing.
SGD with Nesterov momentum 0.9, weight decay 5e-4, batches of 128, crops and flips, a cosine from
0.01 down to 0 (from scratch: from 0.1, after one epoch of warm-up). The paper does not say how it
fine-tuned; these choices are the same for every method and were not tuned.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lbyl
from benchmarks import retraining_report as report
from benchmarks.adaptive import adaptive_ratios
from benchmarks.common import paper
from benchmarks.common.environment import default_device, results_dir, shared_dir
from benchmarks.common.jobs import Ledger, matching, run_parallel
from benchmarks.common.networks import LAYERS, LabelledImages, Pair, load_images, load_network
from benchmarks.common.results import save_results
from benchmarks.padding import padded
from benchmarks.restoration import STEPS
from benchmarks.training import TrainConfig, train
from lbyl.app import data
from lbyl.app.sources import Network, zoo
from lbyl.inputs.images.inversion import invert
from lbyl.inputs.images.procedural import procedural_images
from lbyl.methods import LBYL, NeuronMerging
from lbyl.result import Size
from lbyl.runtime.files import read_json, whole_file
from lbyl.runtime.run import device_of

# The paper's λ₁ and λ₂ for ResNet-50/CIFAR-100 with L2, by ratio.
LAMBDAS = dict(zip(paper.RATIOS, paper.LAMBDAS["resnet50_cifar100"]["l2"]))
RESTORED = ("none", "neuron-merging", "coreset", "lbyl", "echo")
TRANSFERRED = ("original", "none", "neuron-merging", "lbyl", "echo")
DATAFREE = (
    "echo",
    "echo + refinement",
    "none + tenth",
    "echo + tenth",
    "none + synthetic",
    "echo + synthetic",
)
EVAL_BATCH = 1000


def method_of(name: str, ratio: float | None = None) -> Any:
    """A method by the name of its column; LBYL with the paper's λ for the ratio."""
    if name == "neuron-merging":
        return NeuronMerging(variant="released")
    if name == "lbyl":
        lambda1, lambda2 = LAMBDAS[0.3 if ratio is None else ratio]
        return LBYL(lambda1=lambda1, lambda2=lambda2, variant="released")
    return name


@dataclass
class Course:
    """How networks of one setting are trained, and the images for it, loaded when first needed."""

    options: argparse.Namespace
    ledger: Ledger

    @property
    def device(self) -> torch.device:
        return torch.device(self.options.device)

    @cached_property
    def network(self) -> Network:
        return load_network(self.options.network, self.device)

    def prepared(self) -> lbyl.Prepared:
        """The network traced anew: what a compression takes is counted from here on."""
        include = LAYERS.get(self.options.network, "*")
        return lbyl.prepare(self.network.model, self.network.example, include=include)

    @cached_property
    def training(self) -> Pair:
        return self._images("train", self.options.train, self.options.limit)

    @cached_property
    def test(self) -> Pair:
        return self._images("test", self.options.test, self.options.test_limit)

    @cached_property
    def target(self) -> tuple[Pair, Pair]:
        """Training and test images of the data set to transfer to."""
        limits = self.options.limit, self.options.test_limit
        paths = self.options.to, self.options.to_test or self.options.to
        train_set, test_set = (
            self._images(split, path, limit, self.options.classes)
            for split, path, limit in zip(("train", "test"), paths, limits)
        )
        return train_set, test_set

    def _images(
        self, split: str, path: Path | None, limit: int | None, classes: int | None = None
    ) -> Pair:
        """uint8 images and labels on the device; pictures are decoded once and cached."""
        size = self.network.image_size
        images = (
            load_images(self.options.network, split)
            if path is None
            else data.load(path, split, size)
        )
        if images.labels is None:
            raise SystemExit(f"{images.name} has no labels to learn from")
        # The path is part of the name, since many sets lie in folders called `train`.
        mark = hashlib.sha256(f"{path and path.resolve()} {images.name} {size}".encode())
        cache = self.options.scratch / f"{split}-{len(images)}-{mark.hexdigest()[:8]}.npy"
        if not cache.is_file():
            with whole_file(cache) as temporary, temporary.open("wb") as file:
                np.save(file, images.pixels())
        wanted = np.flatnonzero(images.labels < (classes or np.inf))[:limit]
        pixels = torch.from_numpy(np.load(cache, mmap_mode="r")[wanted])
        labels = torch.from_numpy(images.labels[wanted])
        return pixels.to(self.device).permute(0, 3, 1, 2).contiguous(), labels.to(self.device)

    def normalised(self, images: Tensor) -> Tensor:
        scale = (torch.tensor(v, device=self.device) for v in (self.network.mean, self.network.std))
        mean, std = (value.view(1, -1, 1, 1) for value in scale)
        return (images.float() / 255 - mean) / std

    def accuracy(self, model: nn.Module) -> float:
        """Accuracy on the test images of the network's own data set, in %."""
        images, labels = (values.split(EVAL_BATCH) for values in self.test)
        batches = ((self.normalised(x), y) for x, y in zip(images, labels))
        return LabelledImages.of_batches(batches, self.network).accuracy(model)

    def config(self, **changes: Any) -> TrainConfig:
        """The setting of every run, but for what a part says otherwise."""
        cuda = self.device.type == "cuda"
        setting = TrainConfig(
            epochs=self.options.epochs,
            batch_size=self.options.batch,
            learning_rate=self.options.rate,
            mixed_precision="bf16" if cuda else "no",
            augment=self.options.network != "digits",  # a mirrored digit is none
            eval_every=self.options.eval_every,
            eval_batch_size=EVAL_BATCH,
            checkpoint_every=5,
        )
        return replace(setting, **changes)

    def learn(
        self,
        model: nn.Module,
        images: Pair,
        test: Pair,
        config: TrainConfig,
        key: str | None = None,
        raw: bool = True,
    ) -> list[dict[str, Any]]:
        """Train a copy fit for the device; one row an epoch, accuracy in %.

        With `key` there are checkpoints to go on from. `raw` images, of training and test alike,
        still have to be normalised.
        """
        wide = padded(model).to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        out = None if key is None else self.ledger.checkpoints(key)
        scale: dict[str, Any] = {"mean": self.network.mean, "std": self.network.std} if raw else {}
        history = train(
            wide,
            images,
            test,
            config,
            out=out,
            resume=out is not None and any(out.glob("checkpoint-*/state.json")),
            progress=False,
            cpu=self.device.type == "cpu",
            **scale,
        )
        return [{**row, "eval_accuracy": report.percent(row["eval_accuracy"])} for row in history]

    @cached_property
    def synthetic(self) -> tuple[Pair, float]:
        """Synthetic images with the network's own labels, and the seconds they took."""
        start = self.now()
        name, count = self.options.network, self.options.synthetic
        images = synthesise(self.network.model, zoo.info(name), count, self.options.inversion_steps)
        return images, self.now() - start

    def now(self) -> float:
        """The time when the device has finished what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def initialised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same architecture with nothing learned: He's normal weights."""
    fresh = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return fresh


# ---------------------------------------------------------------------------------------------
# The three parts: what one setting does


def finetune(course: Course, key: str) -> dict[str, Any]:
    """Compress by one method at one ratio (or forget all), then train."""
    ratio, name = float(key.split("/")[0]), key.split("/")[1]
    method = "none" if name == "scratch" else method_of(name, ratio)
    result = course.prepared().compress({"*": ratio}, method=method)
    model, config = result.model, course.config()
    if name == "scratch":
        model = initialised(model)
        config = course.config(learning_rate=0.1, warmup_epochs=min(1, config.epochs - 1))
    initial = course.accuracy(model)
    curve = course.learn(model, course.training, course.test, config, key)
    return {
        "ratio": ratio,
        "method": name,
        "initial": initial,
        "final": curve[-1]["eval_accuracy"],
        "size": vars(result.after),
        "original": vars(result.before),
        "curve": curve,
    }


def with_head(model: nn.Module, classes: int, seed: int = 0) -> nn.Module:
    """A copy whose last linear layer tells other classes apart."""
    fresh = copy.deepcopy(model)
    name = [name for name, module in fresh.named_modules() if isinstance(module, nn.Linear)][-1]
    old = fresh.get_submodule(name)
    assert isinstance(old, nn.Linear)
    parent, _, last = name.rpartition(".")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.Linear(old.in_features, classes)
    setattr(fresh.get_submodule(parent), last, head.to(old.weight.device))
    return fresh


def transfer(course: Course, key: str) -> dict[str, Any]:
    """Prune by layer under an error threshold, restore, change the head and train."""
    training, test = course.target
    ratios: dict[str, float] = {}
    prepared, model = course.prepared(), course.network.model
    size = Size.of(model, prepared.graph)
    if key != "original":
        given = course.options.ratios and read_json(course.options.ratios)
        threshold = course.options.threshold
        ratios = given[key] if given else adaptive_ratios(prepared, method_of(key), threshold)
        result = prepared.compress(ratios, method=method_of(key))
        model, size = result.model, result.after
    source = course.accuracy(model)
    model = with_head(model, int(training[1].max()) + 1)
    curve = course.learn(model, training, test, course.config(), key)
    return {
        "method": key,
        "source_accuracy": source,
        "final": curve[-1]["eval_accuracy"],
        # With the new head, but for MACs, of which a head has next to none.
        "size": {**vars(size), "parameters": sum(p.numel() for p in model.parameters())},
        "ratios": ratios,
        "curve": curve,
    }


def datafree(course: Course, key: str) -> dict[str, Any]:
    """One way to a working network; seconds count everything from the original network on."""
    name, _, then = key.partition(" + ")
    ratio = course.options.ratio
    method = method_of(name, ratio)
    course.prepared().compress(
        {"*": ratio}, method=method
    )  # what a device does at the first time only
    start = course.now()
    result = course.prepared().compress({"*": ratio}, method=method)
    seconds = course.now() - start
    initial = course.accuracy(result.model)
    points = [{"seconds": seconds, "accuracy": initial}]
    run: dict[str, Any] = {"ratio": ratio, "initial": initial, "images": 0}
    rows: list[dict[str, Any]] = []
    if then == "tenth":
        images = len(course.training[1]) // 10
        config = course.config(epochs=1, limit=images)
        rows = course.learn(result.model, course.training, course.test, config)
        run |= {"images": images, "epochs": 1}
    elif then == "refinement":
        result = course.prepared().compress({"*": ratio}, method=method, refine=STEPS)
        seconds += result.seconds["refine"]
        points.append({"seconds": seconds, "accuracy": course.accuracy(result.model)})
        run |= {"steps": STEPS}
    elif then == "synthetic":
        synthetic, taken = course.synthetic
        seconds += taken
        points.append({"seconds": seconds, "accuracy": initial})
        rows = distil(course, result.model, synthetic)
        run |= {"synthetic": len(synthetic[1]), "synthesis": taken, "epochs": len(rows)}
    for row in rows:
        seconds += row["seconds"]
        points.append({"seconds": seconds, "accuracy": row["eval_accuracy"]})
    return {**run, "final": points[-1]["accuracy"], "points": points, "size": vars(result.after)}


def distil(course: Course, model: nn.Module, images: Pair) -> list[dict[str, Any]]:
    """Learn from synthetic images, which are normalised already; one row an epoch."""
    config = course.config(epochs=course.options.distil_epochs, eval_every=1)
    test = course.normalised(course.test[0]), course.test[1]
    return course.learn(model, images, test, config, raw=False)


def synthesise(
    model: nn.Module, info: zoo.NetworkInfo, count: int, steps: int, batch: int = 512
) -> Pair:
    """Images that match every BatchNorm's running statistics, each of a class drawn at random.

    Their labels are what the network itself says about them, so learning from them is distillation.
    """
    device = device_of(model)
    images, labels = [], []
    generator = torch.Generator().manual_seed(0)
    for seed, first in enumerate(range(0, count, batch)):
        size = min(batch, count - first)
        start = procedural_images(size, info.input_shape, seed=seed, device=str(device))
        wanted = torch.randint(info.classes, (size,), generator=generator).to(device)
        made = invert(model, [start], steps=steps, objective=_classes(wanted))[0]
        with torch.inference_mode():
            images.append(made)
            labels.append(model(made).softmax(1))
    return torch.cat(images), torch.cat(labels)


def _classes(wanted: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda output: nn.functional.cross_entropy(output, wanted)


# ---------------------------------------------------------------------------------------------
# The command


PARTS: dict[str, Callable[[Course, str], dict[str, Any]]] = {
    "finetune": finetune,
    "transfer": transfer,
    "datafree": datafree,
}
SMALL: dict[str, dict[str, Any]] = {
    "finetune": {"network": "digits", "epochs": 2},
    "transfer": {
        "network": "resnet20_cifar10",
        "epochs": 2,
        "limit": 1000,
        "test_limit": 500,
        "classes": 5,
    },
    "datafree": {"network": "digits", "distil_epochs": 4, "synthetic": 1024},
}


def settings(options: argparse.Namespace) -> list[str]:
    """The keys of a part, the hardest ratio first in case time runs out."""
    if options.part == "transfer":
        return list(TRANSFERRED)
    if options.part == "datafree":
        return list(DATAFREE)
    ratios = sorted((float(r) for r in options.ratio_list.split(",")), reverse=True)
    return [f"{ratio}/{name}" for ratio in ratios for name in ("echo", *RESTORED[:-1], "scratch")]


def parameters(options: argparse.Namespace) -> dict[str, Any]:
    """What a figure depends on: runs made under other values are other runs."""
    names = ["network", "epochs", "batch", "rate", "limit", "test_limit"]
    names += {
        "finetune": [],
        "transfer": ["threshold", "classes"],
        "datafree": ["ratio", "synthetic", "inversion_steps", "distil_epochs"],
    }[options.part]
    return {name: getattr(options, name) for name in names}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--network", default="resnet50_cifar100")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of fine-tuning")
    parser.add_argument("--eval-every", type=int, default=1, help="epochs between evaluations")
    parser.add_argument("--train", type=Path, help="training images (file or torchvision folder)")
    parser.add_argument("--test", type=Path, help="test images")
    parser.add_argument("--limit", type=int, help="training images to use")
    parser.add_argument("--test-limit", type=int, help="test images to use")
    parser.add_argument("--ratio-list", default="0.5,0.3,0.1", help="finetune: ratios")
    parser.add_argument("--to", type=Path, help="transfer: training images of the new task")
    parser.add_argument("--to-test", type=Path, help="transfer: its test images, if elsewhere")
    parser.add_argument("--classes", type=int, help="transfer: the first so many classes only")
    parser.add_argument("--threshold", type=float, default=0.1, help="transfer: largest WARE")
    parser.add_argument("--ratios", type=Path, help="transfer: JSON {method: {layer: ratio}}")
    parser.add_argument("--ratio", type=float, default=0.5, help="datafree: fraction pruned")
    parser.add_argument("--synthetic", type=int, default=5120, help="datafree: images to make")
    parser.add_argument("--inversion-steps", type=int, default=60)
    parser.add_argument("--distil-epochs", type=int, default=10)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--jobs", type=int, default=1, help="settings at once, as processes")
    parser.add_argument("--only", help="settings to run: patterns such as 0.5/*, by commas")
    parser.add_argument("--time-limit", type=float, help="seconds after which to stop and show")
    parser.add_argument("--results", type=Path, default=results_dir())
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="JSON of earlier runs")
    parser.add_argument("--small", action="store_true", help="minutes on two cores")
    default = Path(tempfile.gettempdir()) / "lbyl-retraining"
    parser.add_argument("--scratch", type=Path, default=default, help="finished runs, checkpoints")
    options = parser.parse_args()
    if options.small:
        vars(options).update(SMALL[options.part])
    if options.part == "transfer" and options.to is None:
        options.to, options.to_test = default_target(options.small)
    return options


def default_target(small: bool) -> tuple[Path, Path]:
    """Files in the shared folder: CIFAR-10, or CIFAR-100 for the small network of CIFAR-10."""
    folder, name = shared_dir() / "data", "cifar100" if small else "cifar10"
    return folder / f"{name}_train.npz", folder / f"{name}_test.npz"


def work(course: Course, key: str) -> None:
    """Run one setting and store it."""
    start = time.perf_counter()
    run = PARTS[course.options.part](course, key)
    run["wall_seconds"] = round(time.perf_counter() - start, 2)
    course.ledger.store(key, run)
    shown = {k: run[k] for k in ("initial", "final", "wall_seconds") if k in run}
    print(key, json.dumps(shown), flush=True)


def work_alone(options: argparse.Namespace, ledger: Ledger, key: str) -> None:
    """One setting in a process of its own."""
    work(Course(options, ledger), key)


def run_missing(
    options: argparse.Namespace, ledger: Ledger, keys: list[str], finished: Callable[[], None]
) -> list[str]:
    """Run settings, each stored when it is finished; gives the keys that failed."""
    course = Course(options, ledger)
    if options.part != "datafree" and options.jobs > 1:
        # Pictures are decoded before many processes would.
        _ = (course.target, course.test) if options.part == "transfer" else course.training
        task = functools.partial(work_alone, options, ledger)
        return run_parallel(task, keys, options.jobs, options.time_limit, finished)
    for key in keys:
        work(course, key)
        finished()
    return []


def main() -> None:
    options = arguments()
    name = f"retraining-{options.part}" + ("-small" if options.small else "")
    keys = settings(options)
    ledger = Ledger(name, parameters(options), options.scratch)
    for path in [*options.merge, options.results / f"{name}.json"]:
        ledger.adopt(path)
    ledger.refresh(keys)
    missing = [key for key in matching(keys, options.only) if key not in ledger.runs]

    def store_all() -> None:
        ledger.refresh(keys)
        save_results(name, ledger.to_dict(keys), folder=options.results)

    failed = run_missing(options, ledger, missing, store_all) if missing else []
    ledger.refresh(keys)
    content = ledger.to_dict(keys)
    if content["runs"]:
        report.TABLES[options.part](content)
        figure = report.plot(options.part, content)
        print("stored in", save_results(name, content, figure, options.results))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    # Worker processes import functions by the name of their module, which is not __main__.
    from benchmarks import retraining

    retraining.main()
