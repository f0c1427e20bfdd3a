"""Figures as JSON and PNG files, each written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common.environment import environment, results_dir
from lbyl.runtime.files import read_json, whole_file, write_json


def save_results(name: str, data: Any, figure: Any = None, folder: Path | None = None) -> Path:
    """Write `data` as NAME.json with the environment, and a matplotlib figure as NAME.png."""
    path = (folder or results_dir()) / f"{name}.json"
    write_json(path, {"environment": environment(), **data})
    if figure is not None:
        save_figure(path.with_suffix(".png"), figure)
    return path


def save_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure as PNG."""
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")


def stored_rows(name: str) -> list[dict[str, Any]]:
    """The rows of NAME.json, so that a run goes on where an earlier one ended; none without it."""
    path = results_dir() / f"{name}.json"
    rows: list[dict[str, Any]] = read_json(path)["rows"] if path.is_file() else []
    return rows


def merged_networks(paths: Iterable[Path]) -> dict[str, Any]:
    """Network → figures of earlier runs, each with the environment it was measured in."""
    networks: dict[str, Any] = {}
    for path in paths:
        earlier = read_json(path)
        for name, figures in earlier["networks"].items():
            networks[name] = {"environment": earlier["environment"], **figures}
    return networks
