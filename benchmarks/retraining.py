"""What a restored network is worth as a start: fine-tuning, transfer, and training without data.

    python benchmarks/retraining.py --part finetune   # 20 epochs after each method, or from scratch
    python benchmarks/retraining.py --part transfer   # ratios by layer, a new head, other images
    python benchmarks/retraining.py --part datafree   # seconds and accuracy of ways without data
    (each with --small for minutes on two cores; --jobs N runs N settings at once on one GPU)

Every setting is kept when it is done; the same command again does what is missing and shows all.
SGD with Nesterov momentum 0.9, weight decay 5e-4, batches of 128, crops and flips, a cosine from
0.01 down to 0 (from scratch: from 0.1, after one epoch of warm-up). The paper does not say how it
fine-tuned; these choices are the same for every method and were not tuned.
"""

from __future__ import annotations

import argparse
import copy
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
import paper
import retraining_report as report
from adaptive import adaptive_ratios
from harness import RESULTS, load_data, load_network, save_results
from jobs import Ledger, chosen, run_parallel
from lbyl import data
from lbyl.images import procedural_images
from lbyl.io import read_json, whole_file
from lbyl.result import Size
from lbyl.statistics.inversion import invert
from lbyl.train import TrainConfig, train
from padding import padded
from restoration import LAYERS, STEPS

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

Pair = tuple[Tensor, Tensor]


def method_of(name: str, ratio: float | None = None) -> Any:
    """A method by the name of its column; LBYL with the paper's λ for the ratio."""
    if name == "neuron-merging":
        return lbyl.NeuronMerging(variant="released")
    if name == "lbyl":
        return lbyl.LBYL(*LAMBDAS[0.3 if ratio is None else ratio], variant="released")
    return name


@dataclass
class Lab:
    """A trained network on the device, with images loaded when they are first asked for."""

    options: argparse.Namespace
    ledger: Ledger

    def __post_init__(self) -> None:
        self.device = torch.device(self.options.device)
        self.model, self.info = load_network(self.options.network, self.device)
        self.example = torch.zeros(1, *self.info.input_shape, device=self.device)
        layers = LAYERS.get(self.options.network, {})
        start = time.perf_counter()
        self.graph = lbyl.trace(self.model, self.example, **layers)
        self.tracing = time.perf_counter() - start

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
        places = self.options.to, self.options.to_test or self.options.to
        train_set, test_set = (
            self._images(split, place, limit, self.options.classes)
            for split, place, limit in zip(("train", "test"), places, limits)
        )
        return train_set, test_set

    def _images(
        self, split: str, path: Path | None, limit: int | None, classes: int | None = None
    ) -> Pair:
        """uint8 images and labels on the device; pictures are decoded once and kept aside."""
        size = None if self.info.flatten else self.info.input_shape[-1]
        images = load_data(self.info, split) if path is None else data.load(path, split, size)
        if images.labels is None:
            raise SystemExit(f"{images.name} has no labels to learn from")
        # The place is part of the name, since many sets lie in folders called `train`.
        mark = hashlib.sha256(f"{path and path.resolve()} {images.name} {size}".encode())
        cache = self.options.scratch / f"{split}-{len(images)}-{mark.hexdigest()[:8]}.npy"
        if not cache.is_file():
            with whole_file(cache) as temporary, temporary.open("wb") as file:
                np.save(file, images.pixels())
        wanted = np.flatnonzero(images.labels < (classes or np.inf))[:limit]
        pixels = torch.from_numpy(np.load(cache, mmap_mode="r")[wanted])
        labels = torch.from_numpy(images.labels[wanted])
        return pixels.to(self.device).permute(0, 3, 1, 2).contiguous(), labels.to(self.device)

    def compress(self, ratio: Any, name: str, refine: int = 0) -> lbyl.Result:
        method = method_of(name, ratio if isinstance(ratio, float) else None)
        return lbyl.compress(
            self.model, self.example, ratio, method=method, graph=self.graph, refine=refine
        )

    def normalised(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(v, device=self.device) for v in (self.info.mean, self.info.std))
        return (images.float() / 255 - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)

    @torch.inference_mode()
    def accuracy(self, model: nn.Module, test: Pair | None = None) -> float:
        images, labels = test or self.test
        batches = zip(images.split(EVAL_BATCH), labels.split(EVAL_BATCH))
        hits = sum((model(self.normalised(x)).argmax(1) == y).sum() for x, y in batches)
        return 100 * float(hits) / len(labels)

    def config(self, **changes: Any) -> TrainConfig:
        """The setting of every run, but for what a part says otherwise."""
        cuda = self.device.type == "cuda"
        setting = TrainConfig(
            epochs=self.options.epochs,
            batch_size=self.options.batch,
            learning_rate=self.options.rate,
            mixed_precision="bf16" if cuda else "no",
            augment=self.info.dataset != "digits",  # a mirrored digit is none
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
        wide = padded(model).to(self.device, memory_format=torch.channels_last)
        out = None if key is None else self.ledger.place(key)
        scale: dict[str, Any] = {"mean": self.info.mean, "std": self.info.std} if raw else {}
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


def initialised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same architecture with nothing learned: He's normal weights."""
    fresh = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in fresh.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return fresh


# ---------------------------------------------------------------------------------------------
# The three parts: what one setting does


def finetune(lab: Lab, key: str) -> dict[str, Any]:
    """Compress by one method at one ratio (or forget all), then train."""
    ratio, name = float(key.split("/")[0]), key.split("/")[1]
    done = lab.compress(ratio, "none" if name == "scratch" else name)
    model, config = done.model, lab.config()
    if name == "scratch":
        model = initialised(model)
        config = lab.config(learning_rate=0.1, warmup_epochs=min(1, config.epochs - 1))
    initial = lab.accuracy(model)
    curve = lab.learn(model, lab.training, lab.test, config, key)
    return {
        "ratio": ratio,
        "method": name,
        "initial": initial,
        "final": curve[-1]["eval_accuracy"],
        "size": vars(done.after),
        "original": vars(done.before),
        "curve": curve,
    }


def with_head(model: nn.Module, classes: int, seed: int = 0) -> nn.Module:
    """A copy whose last linear layer tells other classes apart."""
    fresh = copy.deepcopy(model)
    name = [name for name, module in fresh.named_modules() if isinstance(module, nn.Linear)][-1]
    old = fresh.get_submodule(name)
    parent, _, last = name.rpartition(".")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.Linear(old.in_features, classes)
    setattr(fresh.get_submodule(parent), last, head.to(old.weight.device))
    return fresh


def transfer(lab: Lab, key: str) -> dict[str, Any]:
    """Prune by layer under an error threshold, restore, change the head and train."""
    training, test = lab.target
    ratios: dict[str, float] = {}
    model, size, source = lab.model, Size.of(lab.model, lab.graph), lab.accuracy(lab.model)
    if key != "original":
        given = lab.options.ratios and read_json(lab.options.ratios)
        ratios = (
            given[key] if given else adaptive_ratios(lab, method_of(key), lab.options.threshold)
        )
        done = lab.compress(ratios, key)
        model, size, source = done.model, done.after, lab.accuracy(done.model)
    model = with_head(model, int(training[1].max()) + 1)
    curve = lab.learn(model, training, test, lab.config(), key)
    return {
        "method": key,
        "source_accuracy": source,
        "final": curve[-1]["eval_accuracy"],
        # With the new head, but for MACs, of which a head has next to none.
        "size": {**vars(size), "parameters": sum(p.numel() for p in model.parameters())},
        "ratios": ratios,
        "curve": curve,
    }


def datafree(lab: Lab, key: str) -> dict[str, Any]:
    """One way to a working network; seconds count everything from the original network on."""
    name, _, then = key.partition(" + ")
    lab.compress(lab.options.ratio, name)  # what a device does at the first time only
    start = _now(lab)
    done = lab.compress(lab.options.ratio, name)
    seconds = lab.tracing + _now(lab) - start
    initial = lab.accuracy(done.model)
    points = [{"seconds": seconds, "accuracy": initial}]
    run: dict[str, Any] = {"ratio": lab.options.ratio, "initial": initial, "images": 0}
    if then == "tenth":
        images = len(lab.training[1]) // 10
        config = lab.config(epochs=1, limit=images)
        rows = lab.learn(done.model, lab.training, lab.test, config)
        run |= {"images": images, "epochs": 1}
    elif then == "refinement":
        rows = []
        done = lab.compress(lab.options.ratio, name, STEPS)
        seconds += done.seconds["refine"]
        points.append({"seconds": seconds, "accuracy": lab.accuracy(done.model)})
        run |= {"steps": STEPS}
    elif then == "synthetic":
        synthetic, spent = lab_synthetic(lab)
        seconds += spent
        points.append({"seconds": seconds, "accuracy": initial})
        config = lab.config(epochs=lab.options.distil_epochs, eval_every=1)
        test = lab.normalised(lab.test[0]), lab.test[1]  # like the synthetic ones
        rows = lab.learn(done.model, synthetic, test, config, raw=False)
        run |= {"synthetic": len(synthetic[1]), "synthesis": spent, "epochs": len(rows)}
    else:
        rows = []
    for row in rows:
        seconds += row["seconds"]
        points.append({"seconds": seconds, "accuracy": row["eval_accuracy"]})
    return {**run, "final": points[-1]["accuracy"], "points": points, "size": vars(done.after)}


def lab_synthetic(lab: Lab) -> tuple[Pair, float]:
    """Synthetic images of a lab, made once, and the seconds that took."""
    if not hasattr(lab, "synthetic"):
        start = _now(lab)
        made = synthesise(lab.model, lab.info, lab.options.synthetic, lab.options.inversion_steps)
        lab.synthetic = made, _now(lab) - start  # type: ignore[attr-defined]
    return lab.synthetic  # type: ignore[attr-defined,no-any-return]


def synthesise(model: nn.Module, info: Any, count: int, steps: int, batch: int = 512) -> Pair:
    """Images on which every BatchNorm sees what it remembers, each of a class drawn at random.

    Their labels are what the network itself says about them, so learning from them is distillation.
    """
    device = next(model.parameters()).device
    images, labels = [], []
    generator = torch.Generator().manual_seed(0)
    for seed, first in enumerate(range(0, count, batch)):
        size = min(batch, count - first)
        start = procedural_images(size, info.input_shape, seed=seed, device=str(device))
        wanted = torch.randint(info.classes, (size,), generator=generator).to(device)
        made = invert(model, start, steps=steps, objective=_classes(wanted))
        with torch.inference_mode():
            images.append(made)
            labels.append(model(made).softmax(1))
    return torch.cat(images), torch.cat(labels)


def _classes(wanted: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda output: nn.functional.cross_entropy(output, wanted)


def _now(lab: Lab) -> float:
    if lab.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------------------------------------
# The command


PARTS: dict[str, Callable[[Lab, str], dict[str, Any]]] = {
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
    parser.add_argument("--ratio", type=float, default=0.5, help="datafree: share removed")
    parser.add_argument("--synthetic", type=int, default=5120, help="datafree: images to make")
    parser.add_argument("--inversion-steps", type=int, default=60)
    parser.add_argument("--distil-epochs", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="settings at once, as processes")
    parser.add_argument("--only", help="settings to run: patterns such as 0.5/*, by commas")
    parser.add_argument("--time-limit", type=float, help="seconds after which to stop and show")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="JSON of earlier runs")
    parser.add_argument("--small", action="store_true", help="minutes on two cores")
    default = Path(tempfile.gettempdir()) / "lbyl-retraining"
    parser.add_argument("--scratch", type=Path, default=default, help="finished runs, checkpoints")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        vars(options).update(SMALL[options.part])
    if options.part == "transfer" and options.to is None:
        options.to, options.to_test = default_target(options.small)
    return options


def default_target(small: bool) -> tuple[Path, Path]:
    """Files in the shared folder: CIFAR-10, or CIFAR-100 for the small network of CIFAR-10."""
    from harness import shared_dir

    name = "cifar100" if small else "cifar10"
    return tuple(shared_dir() / "data" / f"{name}_{split}.npz" for split in ("train", "test"))  # type: ignore[return-value]


def main() -> None:
    options = arguments()
    name = f"retraining-{options.part}" + ("-small" if options.small else "")
    keys = settings(options)
    ledger = Ledger(name, parameters(options), options.scratch)
    if options.worker:
        work(Lab(options, ledger), ledger, [options.worker])
        return
    for path in [*options.merge, options.results / f"{name}.json"]:
        ledger.adopt(path)
    ledger.refresh(keys)
    todo = [key for key in chosen(keys, options.only) if key not in ledger.found]
    failed: list[str] = []

    def keep() -> None:
        ledger.refresh(keys)
        save_results(name, ledger.to_dict(keys), folder=options.results)

    if todo and options.part != "datafree" and options.jobs > 1:
        lab = Lab(options, ledger)  # decodes pictures before many processes would
        _ = (lab.target, lab.test) if options.part == "transfer" else (lab.training, lab.test)
        del lab
        failed = run_parallel(todo, options.jobs, options.time_limit, keep)
    elif todo:
        work(Lab(options, ledger), ledger, todo, keep)
    ledger.refresh(keys)
    found = ledger.to_dict(keys)
    if found["runs"]:
        report.TABLES[options.part](found)
        print(
            "kept in", save_results(name, found, report.plot(options.part, found), options.results)
        )
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def work(
    lab: Lab, ledger: Ledger, keys: list[str], finished: Callable[[], None] = lambda: None
) -> None:
    """Run settings one after the other, each kept when it is done."""
    for key in keys:
        start = time.perf_counter()
        run = PARTS[lab.options.part](lab, key)
        run["wall_seconds"] = round(time.perf_counter() - start, 2)
        ledger.keep(key, run)
        shown = {k: run[k] for k in ("initial", "final", "wall_seconds") if k in run}
        print(key, json.dumps(shown), flush=True)
        finished()


if __name__ == "__main__":
    main()
