"""Factories in Python of the user's own: a file, or a module that can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lbyl.app.sources.base import image_network
from lbyl.app.sources.network import WEIGHT_FILES, Network
from lbyl.errors import LbylError
from lbyl.runtime.format import first_line
from lbyl.runtime.run import example_shape


def from_file(name: str, word: str | None, classes: int | None) -> Network:
    """A factory in a Python file of the user's own."""
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise LbylError(f"there is no file {path}; a model in Python is path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module, run = importlib.util.module_from_spec(spec), spec.loader.exec_module
    with _importing_from(path.resolve().parent):  # the file may import its neighbours
        return _from_factory(name, lambda: (run(module), module)[1], word, classes)


def from_module(name: str, word: str | None, classes: int | None) -> Network:
    """A factory in an installed package, or in one of the directory that is worked in."""
    package = name.rpartition(":")[0]
    with _importing_from(Path.cwd()):
        try:
            known = importlib.util.find_spec(package) is not None
        except ImportError:
            known = False
        if not known:
            raise LbylError(f"no model is named {name!r}: there is no Python module {package}")
        return _from_factory(name, lambda: importlib.import_module(package), word, classes)


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _from_factory(
    name: str, module: Callable[[], Any], word: str | None, classes: int | None
) -> Network:
    """What a factory makes: a network, or a network and its example inputs."""
    path, _, function = name.rpartition(":")
    if word is not None:
        raise LbylError(f"weights {word!r}: give a {', '.join(WEIGHT_FILES)} file for a {path}")
    try:
        factory = getattr(module(), function, None)
        if not callable(factory):
            raise LbylError(f"{path} has no function {function!r} that makes a model")
        made = factory() if classes is None else factory(classes)
    except LbylError:
        raise
    except Exception as error:
        raise LbylError(f"{name} failed: {type(error).__name__}: {first_line(error)}") from error
    model, *given = made if isinstance(made, tuple) and len(made) == 2 else (made,)
    if not isinstance(model, nn.Module):
        raise LbylError(f"{name} gave a {type(model).__name__}, not a torch.nn.Module")
    network = image_network(model)
    if not given:
        return network
    shape = example_shape(given[0])
    return replace(network, example=given[0], input_shape=shape)
