"""Attention and MLPs pruned in a language model and a Vision Transformer.

    python -m benchmarks.attention llama --refine 200
    python -m benchmarks.attention vit --refine 200

Perplexity on the first windows of held-out text, or accuracy on the first test images, with
queries and keys, heads, values and neurons cut alone and restored, and a quarter of the blocks'
parameters less by budget. Statistics come from what the library makes by itself ("none" of the
data is real), and beside it from real text or images.

At equal parameters stands a slicing of our own making, from SliceGPT's formulas: what every block
reads and leaves is turned onto the principal axes of the stream there, and the last axes go.
The two matrices a block that turn one stream into the next count as parameters. Kept axes are
projected onto, which computes the same without changing a shape.

Figures are stored after every row, so that a run that is cut off has not been for nothing.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lbyl
from benchmarks.common.environment import default_device, environment, results_dir, shared_dir
from benchmarks.common.text import (
    FEW,
    MANY,
    calibration_windows,
    language_model,
    measured_windows,
    perplexity,
)
from lbyl.runtime.files import write_json
from lbyl.surgery.cut import copy_model

EVERYTHING = ("*", "*:heads", "*:qk", "*:v")
ROWS: dict[str, dict[str, dict[str, float]]] = {
    "llama": {
        "qk 50 %": {"*:qk": 0.5},
        "heads 25 %": {"*:heads": 0.25},
        "v 50 %": {"*:v": 0.5},
        "query heads 25 %": {"*:queries": 0.25},
        "neurons 31 %": {"*mlp*": 0.3125},  # a quarter of the blocks' parameters, as is
        "stream 25 %": {"*o_proj": 0.25},  # a quarter of the residual stream
    },
    "vit": {
        "neurons 30 %": {"*mlp*": 0.3},
        "neurons 50 %": {"*mlp*": 0.5},
        "qk 50 %": {"*:qk": 0.5},
        "heads 33 %": {"*:heads": 1 / 3},
    },
}
STREAM = "stream"  # rows that need residual=True
QUERIES = "query heads"  # rows that need them instead of whole heads
LESS = 0.25  # of the parameters of blocks, by budget
OWN, REAL = "own", "real"
CALIBRATION = 1024  # real images

Measure = Callable[[nn.Module], dict[str, float]]


def vision_transformer(device: str = "cpu") -> nn.Module:
    """The Vision Transformer for CIFAR-100 in float32."""
    from safetensors.torch import load_file
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 4, 8, 6, 192, 768, num_classes=100)
    state = load_file(shared_dir() / "models" / "vit_cifar100.safetensors")
    model.load_state_dict({name: x.float() for name, x in state.items()})
    return model.eval().to(device)


def normalised(images: Tensor) -> Tensor:
    """(n, 3, 32, 32) of bytes (n, 32, 32, 3), as the Vision Transformer reads them."""
    mean, std = torch.tensor([0.5071, 0.4867, 0.4408]), torch.tensor([0.2675, 0.2565, 0.2761])
    images = images.permute(0, 3, 1, 2).float() / 255
    return (images - mean[:, None, None]) / std[:, None, None]


def test_images(count: int) -> tuple[Tensor, Tensor]:
    """The first test images of CIFAR-100, normalised, and their labels."""
    stored = np.load(shared_dir() / "data" / "cifar100_test.npz")
    images = normalised(torch.from_numpy(stored["images"][:count]))
    return images, torch.from_numpy(stored["labels"][:count]).long()


def training_images(count: int) -> Tensor:
    """Real images for the column beside ours."""
    from lbyl.app import data

    found = data.load(shared_dir() / "data" / "cifar100_train.npz", "train")
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    parts = [x for x, _ in found.batches(256, mean, std, torch.device("cpu"), count)]
    return torch.cat(parts)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images that a model names rightly."""
    with torch.no_grad():
        right = [
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(images.split(250), labels.split(250), strict=True)
        ]
    return 100 * sum(right) / len(labels)


def block_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters inside blocks, and all of them."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(n for name, n in sizes.items() if "layers." in name), sum(sizes.values())


def blocks_budget(model: nn.Module, less: float = LESS) -> lbyl.Budget:
    """The budget that leaves out this fraction of the parameters inside blocks."""
    blocks, everything = block_parameters(model)
    return lbyl.Budget(params=1 - less * blocks / everything)


# ------------------------------------------------------------------------------- SliceGPT-style


def sliced_width(parameters: int, blocks: int, width: int, less: float = LESS) -> int:
    """The width at which blocks of so many parameters, with two turning matrices each (width²),
    have this fraction less: p·w/width + 2·blocks·w² = (1 − less)·p."""
    slope, square = parameters / width, 2 * blocks
    root = math.sqrt(slope**2 + 4 * square * (1 - less) * parameters)
    return int((root - slope) / (2 * square))


def sliced_stream(model: nn.Module, texts: Tensor, width: int) -> nn.Module:
    """A copy of a Llama whose stream is projected, before every norm, onto its principal axes.

    Axes are found in order, on what the projections before leave of the texts.
    """
    slim = copy_model(model)
    norms = [m for m in slim.modules() if type(m).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.register_forward_pre_hook(_Projection(width))
    with torch.no_grad():
        slim(texts)
    return slim


class _Projection:
    """Projects a norm's input in place (the stream that goes on beside it, too)."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.projection: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        stream = inputs[0]
        if self.projection is None:
            flat = stream.flatten(0, -2).double()
            axes = torch.linalg.eigh(flat.T @ flat).eigenvectors[:, -self.width :]
            self.projection = (axes @ axes.T).to(stream)
        stream.copy_(stream @ self.projection)


# ---------------------------------------------------------------------------------------- rows


def ways(prepared: lbyl.Prepared, amount: Any, refine: int) -> dict[str, Callable[[], lbyl.Result]]:
    """Way → what makes the network."""
    made: dict[str, Callable[[], lbyl.Result]] = {}
    if not isinstance(amount, lbyl.Budget):
        for by in ("l2", "echo"):
            made[f"{by}, cut"] = partial(prepared.compress, amount, method="none", criterion=by)
    made["restored"] = lambda: prepared.compress(amount)
    if refine:
        made[f"{refine} steps"] = lambda: prepared.compress(amount, refine=refine)
    return made


def rows_of(
    prepared: lbyl.Prepared, amounts: dict[str, Any], measure: Measure, refine: int
) -> dict[str, Any]:
    """Row → way → figures."""
    figures: dict[str, Any] = {}
    for name, amount in amounts.items():
        figures[name] = {}
        for way, make in ways(prepared, amount, refine).items():
            start = time.perf_counter()
            result = make()
            seconds = time.perf_counter() - start
            found: dict[str, Any] = {**measure(result.model), "seconds": round(seconds, 1)}
            if isinstance(amount, lbyl.Budget) and result.allocation is not None:
                found["allocation"] = str(result.allocation)
            figures[name][way] = found
            print(f"{name:20} {way:12} {found}", flush=True)
    return figures


def run(
    model: nn.Module,
    example: Tensor,
    sources: dict[str, Any],
    amounts: dict[str, Any],
    measure: Measure,
    refine: int,
    store: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Source → row → way → figures."""
    figures: dict[str, Any] = {}
    for source, data in sources.items():
        print(f"-- {source}", flush=True)
        whole = lbyl.prepare(model, example, include=EVERYTHING, data=data)
        figures[source] = {}
        for name, amount in amounts.items():
            prepared = whole
            if STREAM in name:
                prepared = lbyl.prepare(model, example, residual=True, data=data)
            if QUERIES in name:
                prepared = lbyl.prepare(model, example, include="*:queries", data=data)
            figures[source] |= rows_of(prepared, {name: amount}, measure, refine)
            store(figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=tuple(ROWS))
    parser.add_argument("--refine", type=int, default=0, help="steps, as a column of its own")
    parser.add_argument("--source", nargs="+", default=[OWN, REAL], choices=[OWN, REAL])
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--inputs", type=int, help="texts or images to collect on")
    parser.add_argument("--images", type=int, default=10_000, help="of the test set")
    parser.add_argument("--windows", type=int, default=FEW)
    parser.add_argument("--all-windows", action="store_true", help="also on 1,000 windows")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--out", type=Path, help="attention-<network>.json unless given")
    given = parser.parse_args()
    out = given.out or results_dir() / f"attention-{given.network}.json"
    amounts: dict[str, Any] = dict(ROWS[given.network])
    if given.network == "vit":
        model = vision_transformer(given.device)
        images, labels = (x.to(given.device) for x in test_images(given.images))
        example = images[:2]
        real: Any = training_images(given.inputs or CALIBRATION).to(given.device)

        def measure(slim: nn.Module) -> dict[str, float]:
            return {f"{len(labels):,} images": round(accuracy(slim, images, labels), 2)}

    else:
        model = language_model(given.device)
        amounts["budget, 25 % fewer"] = blocks_budget(model)
        few = {f"{given.windows} windows": measured_windows(given.windows)}
        windows = few | ({"1,000 windows": measured_windows(MANY)} if given.all_windows else {})
        windows = {name: x.to(given.device) for name, x in windows.items()}
        texts = calibration_windows(given.inputs or 96).to(given.device)
        example, real = texts[:2], list(texts.split(8))

        def measure(slim: nn.Module) -> dict[str, float]:
            return {name: round(perplexity(slim, x), 3) for name, x in windows.items()}

    base = measure(model)
    print(f"whole: {base}", flush=True)
    amounts = {name: amount for name, amount in amounts.items() if given.only in name}
    sources = {s: real if s == REAL else given.inputs for s in given.source}

    def store(figures: dict[str, Any]) -> None:
        write_json(out, {"environment": environment(), "base": base, "figures": figures})

    figures = run(model, example, sources, amounts, measure, given.refine, store)
    if given.network == "llama" and any("budget" in name for name in amounts):
        figures["SliceGPT-style, 25 % fewer"] = slices(model, given.source, texts, measure)
        store(figures)


def slices(
    model: nn.Module, sources: Sequence[str], real: Tensor, measure: Measure
) -> dict[str, Any]:
    """Source → figures of the sliced stream at equal parameters of blocks."""
    config: Any = model.config
    blocks, _ = block_parameters(model)
    width = sliced_width(blocks, config.num_hidden_layers, config.hidden_size)
    made = {}
    for source in sources:
        texts = real
        if source == OWN:
            drawn = lbyl.prepare(model, real[:2], data=len(real)).fresh.collection().batches
            texts = torch.cat(list(drawn))
        made[source] = {**measure(sliced_stream(model, texts, width)), "width": width}
        print(f"SliceGPT-style, {source}: {made[source]}", flush=True)
    return made


if __name__ == "__main__":
    main()
