"""What the tests of the command line share: small networks in files, and two ways to run it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lbyl.app.cli.app import app

NETWORK = """
import torch
from torch import nn


def small(classes=5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, classes),
    )


def vectors():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))


def broken():
    raise RuntimeError("no such luck")


def number():
    return 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Path of a Python file with factories of networks."""
    path = tmp_path / "net.py"
    path.write_text(NETWORK)
    return str(path)


@pytest.fixture
def small(file: str) -> list[str]:
    """Arguments that name a small network of images."""
    return [f"{file}:small", "--input-size", "12"]


Run = Callable[..., Any]


def invoked(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def run() -> Run:
    """Run a command in this process and return what came of it."""
    return invoked


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped network of the zoo without half of its channels, made once; not to be changed."""
    out = tmp_path_factory.mktemp("compressed") / "out"
    measured = ["--test", "digits", "--limit", "100"] if importlib.util.find_spec("sklearn") else []
    settings = ["--weights", "shipped", "--ratio", "0.5", "--data", "64", *measured]
    invoked("compress", "lbyl:digits", *settings, "--out", out)
    return out


@pytest.fixture
def slim(compressed: Path, tmp_path: Path) -> Path:
    """A directory like it, to do with as a test likes."""
    return Path(shutil.copytree(compressed, tmp_path / "slim"))


@pytest.fixture
def run_json(run: Run) -> Run:
    """Run a command with --json; stdout must be JSON and nothing else, stderr empty."""

    def invoke(*arguments: str) -> Any:
        result = run(*arguments, "--json")
        assert result.stderr == ""
        return json.loads(result.stdout)

    return invoke


@pytest.fixture
def program() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed program `lbyl` as a user does."""
    path = Path(sys.executable).with_name("lbyl")
    if not path.exists():
        pytest.skip(f"lbyl is not installed beside {sys.executable}")

    def invoke(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(path), *map(str, arguments)], capture_output=True, text=True, **options
        )

    return invoke
