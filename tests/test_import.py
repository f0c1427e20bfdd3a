"""The package as it is imported: light, small, and without names that hide each other."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import lbyl

LIGHT = """
import sys
import lbyl
assert dir(lbyl) and lbyl.__version__
heavy = [name for name in ("torch", "numpy", "torchvision", "rich") if name in sys.modules]
sys.exit(", ".join(heavy) or 0)
"""
HELP = """
import sys
import runpy
sys.argv = ["lbyl", "--help"]
try:
    runpy.run_module("lbyl", run_name="__main__")
except SystemExit:
    pass
sys.exit("torch" if "torch" in sys.modules else 0)
"""


@pytest.mark.parametrize("program", [LIGHT, HELP], ids=["import lbyl", "lbyl --help"])
def test_torch_is_not_loaded_before_it_is_needed(program: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr or ran.stdout


def test_there_are_at_most_17_public_names_and_all_are_there() -> None:
    assert len(lbyl.__all__) == len(set(lbyl.__all__)) <= 17
    assert lbyl.__all__ == sorted(lbyl.__all__)
    for name in lbyl.__all__:
        assert getattr(lbyl, name) is not None and name in dir(lbyl)
    with pytest.raises(AttributeError, match="no attribute 'collect'"):
        lbyl.collect  # noqa: B018  # private: it is not there


def test_compress_takes_at_most_13_parameters() -> None:
    parameters = inspect.signature(lbyl.compress).parameters
    assert len(parameters) <= 13
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["model", "example_inputs", "ratio"]


@pytest.mark.parametrize("name", lbyl.__all__)
def test_no_name_hides_a_module(name: str) -> None:
    if not isinstance(getattr(lbyl, name), ModuleType):
        assert importlib.util.find_spec(f"lbyl.{name}") is None


def test_modules_are_themselves() -> None:
    assert isinstance(lbyl.methods, ModuleType) and isinstance(lbyl.criteria, ModuleType)
    for module in (lbyl.methods, lbyl.criteria):
        assert module.names() and callable(module.register) and callable(module.resolve)
    assert lbyl.methods.names() == [
        "coreset", "echo", "fold", "lbyl", "moments", "neuron-merging", "none", "one-to-one",
    ]  # fmt: skip
