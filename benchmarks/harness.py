"""What the benchmarks share: where models and data lie, and how results are shown and kept."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import lbyl
from lbyl import data, zoo
from lbyl.io import whole_file, write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("LBYL_RESULTS", ROOT / "docs" / "results"))

# Folder `data` of the shared directory; torchvision's layout is read where a path is given.
FILES = {
    ("FashionMNIST", "test"): "t10k-images-idx3-ubyte.gz",
    ("CIFAR-10", "test"): "cifar10_test.npz",
    ("CIFAR-100", "test"): "cifar100_test.npz",
    ("CIFAR-100", "train"): "cifar100_train.npz",
    ("ImageNet", "test"): "imagenet_val1000.npz",
}


def shared_dir() -> Path:
    """The directory that holds `models/` and `data/`: $LBYL_SHARED, or beside the repository."""
    return Path(os.environ.get("LBYL_SHARED", ROOT.parent / "shared"))


def load_network(
    name: str, device: str | torch.device = "cpu", weights: str | Path | None = None
) -> tuple[nn.Module, zoo.NetworkInfo]:
    """A trained network of the zoo in evaluation mode, and what its inputs must look like."""
    info = zoo.info(name)
    if weights is None:
        weights = "shipped" if name == "digits" else shared_dir() / "models" / info.weights
    return zoo.create(name, weights).to(device), info


def load_data(
    info: zoo.NetworkInfo, split: str = "test", path: str | Path | None = None
) -> data.ImageSet:
    """The images a network was made for; `path` names another file or a torchvision folder."""
    if path is None:
        if info.dataset == "digits":
            return data.load("digits", split)
        if (info.dataset, split) not in FILES:
            raise SystemExit(f"no {split} images of {info.dataset} in {shared_dir()}: give a path")
        path = shared_dir() / "data" / FILES[info.dataset, split]
    return data.load(path, split, size=224 if info.dataset == "ImageNet" else None)


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code: command, versions, hardware and date."""
    names = ("torch", "torchvision", "numpy", "safetensors")
    return {
        "command": shlex.join(["python", *_relative(sys.argv)]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "versions": {"lbyl": lbyl.__version__, **{name: _version(name) for name in names}},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def save_results(name: str, data: Any, figure: Any = None, folder: Path = RESULTS) -> Path:
    """Keep `data` as NAME.json with the environment, and a matplotlib figure as NAME.png."""
    path = folder / f"{name}.json"
    write_json(path, {"environment": environment(), **data})
    if figure is not None:
        save_figure(path.with_suffix(".png"), figure)
    return path


def save_figure(path: Path, figure: Any) -> None:
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")


def pyplot() -> Any:
    """matplotlib's pyplot for files alone; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on the terminal; floats to two decimals, None as a dash."""
    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(_cell, row))
    # Piped into a file there is no terminal to fit: wide tables must not be folded there.
    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _relative(arguments: Sequence[str]) -> list[str]:
    """The script's path as seen from the repository, so that no home directory is published."""
    script = Path(arguments[0]).resolve()
    inside = script.is_relative_to(ROOT)
    return [str(script.relative_to(ROOT) if inside else script.name), *arguments[1:]]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({os.cpu_count()} cores)"
