"""What a figure depends on besides the code: command, versions, hardware and date."""

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

import lbyl

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "torchvision", "numpy", "safetensors")


def shared_dir() -> Path:
    """The directory that holds `models/` and `data/`: $LBYL_SHARED, or beside the repository."""
    return Path(os.environ.get("LBYL_SHARED", ROOT.parent / "shared"))


def results_dir() -> Path:
    """Where figures are stored: $LBYL_RESULTS, or docs/results."""
    return Path(os.environ.get("LBYL_RESULTS", ROOT / "docs" / "results"))


def environment() -> dict[str, Any]:
    """Command, date, versions and hardware of this run, as plain data."""
    versions = {"lbyl": lbyl.__version__, **{name: _version(name) for name in PACKAGES}}
    return {
        "command": command(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "versions": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def command(arguments: Sequence[str]) -> str:
    """What a person types in the repository root; no home directory is published."""
    script = Path(arguments[0]).resolve()
    if not script.is_relative_to(ROOT):
        return shlex.join(["python", script.name, *arguments[1:]])
    inside = script.relative_to(ROOT)
    if inside.parts[0] != "benchmarks":
        return shlex.join(["python", str(inside), *arguments[1:]])
    parts = [part for part in inside.with_suffix("").parts if part != "__main__"]
    return shlex.join(["python", "-m", ".".join(parts), *arguments[1:]])


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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
