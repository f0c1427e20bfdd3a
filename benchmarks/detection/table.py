"""Average precision of an SSD whose backbone was pruned and restored, the paper's figures beside.

    python -m benchmarks.detection                # SSD on ResNet-50, 8,000 drawn images (a GPU)
    python -m benchmarks.detection --small        # minutes on two cores
    python -m benchmarks.detection --coco DIR     # a COCO folder as it is, instead of drawn images

Draws a detection set (or takes COCO), trains an SSD on it once and stores its weights, prunes the
ResNet of its backbone and measures COCO's six figures. Nothing is fine-tuned, and no method sees
an image of the set. The paper's figures are of another network on another set (SSD on ResNet-50,
COCO 2017): to be compared are losses beside the unpruned network, not levels.

The paper prints no λ for its detector. It says that it left the term of BatchNorm out, since γ and
σ were too small to divide by: `lbyl` is the released variant with λ₁ = 0, and λ₂ = 0.05, amid what
it prints for ResNets on ImageNet. `lbyl, best λ` is the best of a grid, chosen by the average
precision that is then shown: more than a user without data could have.
"""

from __future__ import annotations

import argparse
import copy
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lbyl
from benchmarks.common import paper
from benchmarks.common.environment import default_device, results_dir
from benchmarks.common.plots import pyplot
from benchmarks.common.results import save_results
from benchmarks.common.tables import print_table
from benchmarks.detection.batched import detect_packed
from benchmarks.detection.coco import CocoImages, find_coco, open_coco
from benchmarks.detection.draw import DrawConfig, draw_detection_set
from benchmarks.detection.evaluate import METRICS, average_precision
from benchmarks.detection.packed import PackedImages, pack_images
from benchmarks.detection.ssd import build_ssd
from benchmarks.detection.train import train_detector
from lbyl.methods import LBYL, NeuronMerging
from lbyl.runtime.files import read_json, read_tensors, write_json, write_tensors
from lbyl.runtime.run import device_of

RATIOS = (0.1, 0.2, 0.3)
CRITERIA = ("l2", "l2-gm", "l1")
COLUMNS = ("none", "neuron-merging", "lbyl", "lbyl, best λ", "echo")
LAMBDAS = (0.0, 0.05)
GRID = ((0.0, 1e-3), (0.0, 1e-2), (0.0, 0.2))  # and LAMBDAS


@dataclass(frozen=True)
class Setting:
    """What is trained on what."""

    size: int = 128
    train: int | None = 8000
    val: int | None = 1000
    depth: int = 50
    width: int = 64
    epochs: int = 20
    batch: int = 32
    lr: float = 0.001
    seed: int = 0
    procedural: int | None = None  # images of the statistics; None: as many as the library takes

    @property
    def name(self) -> str:
        """Of what the weights depend on."""
        names = ("size", "depth", "width", "epochs", "batch", "lr", "seed")
        return "-".join(f"{name}{getattr(self, name)}" for name in names)


SMALL = Setting(
    train=600, val=150, depth=10, width=16, epochs=10, batch=8, lr=0.002, procedural=128
)


class Timer:
    """Seconds by stage, added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def adding(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    @contextmanager
    def telling(self, stage: str) -> Iterator[None]:
        """As `adding`, and printed at the end."""
        with self.adding(stage):
            yield
        print(f"{stage}: {self.seconds[stage]:.1f} s", flush=True)


@dataclass
class Judge:
    """The images a detector is measured by, and the processes that compute COCO's figures."""

    val: PackedImages
    annotations: Path
    pool: Executor
    batch: int

    def figures(self, model: nn.Module) -> Future[dict[str, float]]:
        """The six figures, in the making: COCO's own code is Python, and runs elsewhere."""
        rows = detect_packed(model, self.val, self.batch)
        return self.pool.submit(coco_figures, self.annotations, rows, self.val.ids)


@functools.cache
def _index(annotations: Path) -> Any:
    return open_coco(annotations)


def coco_figures(annotations: Path, rows: Any, ids: tuple[int, ...]) -> dict[str, float]:
    """AP and its kin in %, of detections given as COCO's rows."""
    figures = average_precision(_index(annotations), rows, ids)
    return {name: 100 * value for name, value in figures.items()}


@dataclass
class Backbone:
    """The ResNet of a detector, prepared without data; statistics of so many images, if given."""

    detector: Any
    example: torch.Tensor
    images: int | None = None

    @functools.cached_property
    def weights_alone(self) -> lbyl.Prepared:
        return lbyl.prepare(self.detector.backbone, self.example, include="layer*")

    @functools.cached_property
    def with_images(self) -> lbyl.Prepared:
        if self.images is None:
            return self.weights_alone
        images = self.images
        return lbyl.prepare(self.detector.backbone, self.example, include="layer*", data=images)

    def slim(self, ratio: float, criterion: str, method: Any) -> tuple[nn.Module, lbyl.Result]:
        """A copy of the detector with a smaller backbone."""
        looks = lbyl.methods.resolve(method).needs_statistics
        prepared = self.with_images if looks else self.weights_alone
        result = prepared.compress({"*": ratio}, criterion=criterion, method=method)
        detector = copy.copy(self.detector)
        # Modules live in a dict that a shallow copy shares.
        detector._modules = {**self.detector._modules, "backbone": result.model}
        return detector, result


def workers(jobs: int) -> ProcessPoolExecutor:
    """Processes for drawing and judging, forked at once: while no GPU is in use, that is safe."""
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context(method))
    pool.submit(os.getpid).result()
    return pool


def draw(setting: Setting, folder: Path, pool: Executor) -> Path:
    """The drawn set for a setting; what is there already is not drawn again."""
    drawn = folder / f"drawn-{setting.size}px-seed{setting.seed}"
    for kind, images in (("train", setting.train), ("val", setting.val)):
        split = f"{kind}{images}"
        if not (drawn / "annotations" / f"instances_{split}.json").is_file():
            config = DrawConfig(images or 1, setting.size, setting.seed)
            draw_detection_set(drawn, config, split, pool)
    return drawn


def splits(setting: Setting, coco: Path | None) -> tuple[str, str]:
    """Names of the parts to train on and to judge by."""
    if coco is not None:
        return "train", "val"
    return f"train{setting.train}", f"val{setting.val}"


def trained(
    setting: Setting, folder: Path, split: str, weights: Path, device: str, threads: int
) -> tuple[nn.Module, list[dict[str, float]]]:
    """The detector of a setting, from its file or trained now and stored; and its epochs."""
    file = weights / f"ssd-{setting.name}-{split}.safetensors"
    data = CocoImages(folder, split=split, limit=setting.train)
    torch.manual_seed(setting.seed)
    model = build_ssd(len(data.categories), setting.size, depth=setting.depth, width=setting.width)
    if file.is_file():
        model.load_state_dict(read_tensors(file)[0])
        return model.to(device).eval(), read_json(file.with_suffix(".json"))["epochs"]
    epochs = train_detector(
        model,
        pack_images(data, setting.size, threads),
        setting.epochs,
        setting.lr,
        device,
        bf16=torch.device(device).type == "cuda",
        optimizer="adamw",
        batch_size=setting.batch,
        seed=setting.seed,
        progress=True,
    )
    write_json(file.with_suffix(".json"), {"setting": asdict(setting), "epochs": epochs})
    write_tensors(file, model.state_dict(), {})
    return model, epochs


def judge_of(
    setting: Setting, folder: Path, split: str, pool: Executor, device: torch.device
) -> Judge:
    """Decode the images to judge by."""
    data = CocoImages(folder, split=split, limit=setting.val)
    val = pack_images(data, setting.size, os.cpu_count() or 1).to(device)
    # Candidates are compared pairwise in every class.
    batch = max(1, 512 // len(data.categories)) if device.type == "cuda" else 8
    return Judge(val, find_coco(folder, split=split)[0], pool, batch)


def methods(grid: bool) -> Iterator[tuple[str, Any]]:
    """(column, method); several of one column stand for the best of them."""
    yield "none", "none"
    yield "neuron-merging", NeuronMerging(variant="released")
    yield "lbyl", released(*LAMBDAS)
    for pair in GRID if grid else ():
        yield "lbyl, best λ", released(*pair)
    yield "echo", "echo"


def released(lambda1: float, lambda2: float) -> LBYL:
    return LBYL(lambda1=lambda1, lambda2=lambda2, variant="released")


def measure(
    backbone: Backbone, judge: Judge, grid: bool, timer: Timer | None = None
) -> list[dict[str, Any]]:
    """Every ratio, criterion and method; a row each."""
    timer = timer or Timer()
    waiting = []
    for criterion in CRITERIA:
        for ratio in RATIOS:
            for column, method in methods(grid):
                with timer.adding("compress"):
                    detector, result = backbone.slim(ratio, criterion, method)
                row = {"criterion": criterion, "ratio": ratio, "method": column}
                row |= {"macs": result.after.macs, "parameters": result.after.parameters}
                if isinstance(method, LBYL):
                    row |= {"lambda1": method.lambda1, "lambda2": method.lambda2}
                with timer.adding("detect"):
                    figures = judge.figures(detector)
                waiting.append((row, figures))
                if grid and column == "lbyl":
                    waiting.append(({**row, "method": "lbyl, best λ"}, figures))
    with timer.adding("judge, left over"):
        rows = best_of({**row, **future.result()} for row, future in waiting)
    return [{**row, "paper": published(row)} for row in rows]


def best_of(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each criterion, ratio and method: the one of the highest AP."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = row["criterion"], row["ratio"], row["method"]
        if key not in best or row["AP"] > best[key]["AP"]:
            best[key] = row
    return list(best.values())


def published(row: dict[str, Any]) -> dict[str, float] | None:
    """The paper's figures for a row, of its own network and set; it chose its λ too."""
    printed = paper.DETECTION.get((row["criterion"], row["method"].removesuffix(", best λ")))
    if printed is None or row["ratio"] not in paper.DETECTION_RATIOS:
        return None
    return dict(zip(METRICS, printed[paper.DETECTION_RATIOS.index(row["ratio"])]))


def show(base: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """The table: ours and, to the right, the paper's."""
    none = dict.fromkeys(METRICS)
    table = [["unpruned", *base.values(), *paper.DETECTION_BASE]]
    for row in rows:
        name = f"{row['criterion']} {100 * row['ratio']:.0f} % {row['method']}"
        beside = row["paper"] or none
        table.append([name, *(row[m] for m in METRICS), *(beside[m] for m in METRICS)])
    columns = ["pruned", *METRICS, *(f"{name} (paper)" for name in METRICS)]
    print_table("SSD, backbone pruned; the paper's are SSD/ResNet-50 on COCO 2017", columns, table)


def plot(base: dict[str, float], rows: list[dict[str, Any]], title: str) -> Any:
    """AP against ratio, a panel per criterion: ours above, the paper's below."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panels = plt.subplots(2, len(CRITERIA), figsize=(12, 7), squeeze=False)
    for column, criterion in enumerate(CRITERIA):
        ours, theirs = panels[0][column], panels[1][column]
        for number, method in enumerate(COLUMNS):
            chosen = [r for r in rows if (r["criterion"], r["method"]) == (criterion, method)]
            style = {"color": f"C{number}", "linewidth": 3 if method == "echo" else 1.5}
            points = [(0.0, base["AP"]), *((100 * r["ratio"], r["AP"]) for r in chosen)]
            if chosen:
                ours.plot(*zip(*points), "o-", label=method, **style)
            if (criterion, method) in paper.DETECTION:
                levels = [
                    paper.DETECTION_BASE[0],
                    *(figures[0] for figures in paper.DETECTION[criterion, method]),
                ]
                ratios = [0.0, *(100 * ratio for ratio in paper.DETECTION_RATIOS)]
                theirs.plot(ratios, levels, "s--", label=method, **style)
        ours.set_title(f"criterion {criterion}")
        theirs.set_xlabel("filters removed, %")
        for panel, best in ((ours, base["AP"]), (theirs, paper.DETECTION_BASE[0])):
            panel.grid(alpha=0.3)
            panel.set_ylim(0, 1.08 * max(best, 0.1))
    panels[0][0].set_ylabel(f"AP, {title}")
    panels[1][0].set_ylabel("AP, the paper's: SSD/ResNet-50, COCO")
    panels[0][0].legend(fontsize=8)
    panels[1][0].legend(fontsize=8)
    figure.tight_layout()
    return figure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="minutes on two cores")
    parser.add_argument("--coco", type=Path, help="a COCO folder to use instead of drawn images")
    parser.add_argument("--data", type=Path, help="where drawn images are stored")
    parser.add_argument("--weights", type=Path, help="where trained weights are stored")
    parser.add_argument(
        "--results", type=Path, default=results_dir(), help="where figures are stored"
    )
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--no-grid", action="store_true", help="only one λ for lbyl, as if small")
    for name in ("size", "train", "val", "depth", "width", "epochs", "batch", "seed"):
        parser.add_argument(f"--{name}", type=int, help=f"instead of the setting's {name}")
    parser.add_argument("--lr", type=float, help="instead of the setting's lr")
    return parser.parse_args()


def choose(options: argparse.Namespace) -> Setting:
    """The setting asked for: all of COCO at 300 px unless told otherwise."""
    setting = SMALL if options.small else Setting()
    if options.coco is not None and not options.small:
        setting = replace(setting, size=300, train=None, val=None)
    asked = {key: getattr(options, key, None) for key in asdict(setting)}
    given = {key: value for key, value in asked.items() if value is not None}
    return replace(setting, **given)


def main() -> None:
    options = arguments()
    setting = choose(options)
    cache = options.data or Path(tempfile.gettempdir()) / "lbyl-detection"
    weights = options.weights or cache / "weights"
    timer = Timer()
    with workers(options.jobs) as pool:
        with timer.telling("draw"):
            folder = options.coco or draw(setting, cache, pool)
        train_split, val_split = splits(setting, options.coco)
        threads = max(2, options.jobs)
        with timer.telling("train"):
            model, epochs = trained(setting, folder, train_split, weights, options.device, threads)
        with timer.telling("trace and collect"):
            device = device_of(model)
            example = torch.zeros(1, 3, setting.size, setting.size, device=device)
            backbone = Backbone(model, example, setting.procedural)
            backbone.with_images.statistics()
            judge = judge_of(setting, folder, val_split, pool, device)
        with timer.telling("measure"):
            original = judge.figures(model)
            rows = measure(backbone, judge, not (options.no_grid or options.small), timer)
        base = original.result()
    show(base, rows)
    source = "COCO" if options.coco else "drawn set"
    content = {
        "setting": {**asdict(setting), "source": source, "images": len(judge.val)},
        "base": base,
        "paper base": dict(zip(METRICS, paper.DETECTION_BASE)),
        "rows": rows,
        "epochs": epochs,
        "seconds": {name: round(seconds, 2) for name, seconds in timer.seconds.items()},
    }
    name = "detection-coco" if options.coco else "detection"
    name += "-small" if options.small else ""
    figure = plot(base, rows, f"SSD/ResNet-{setting.depth}, {source}")
    print("stored in", save_results(name, content, figure, options.results))
