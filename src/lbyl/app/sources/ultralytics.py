"""Ultralytics' networks: built by its own classes from a yaml, which a weights file brings along.

A `.pt` of Ultralytics is a pickled network. It is read as dead data (`pickled.py`): its
recipe builds the network anew and its tensors fill it. Recipes name classes and hold Python for
the activation, so what they name is checked first to be a layer and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lbyl.app.sources.base import imported, register
from lbyl.app.sources.network import Network
from lbyl.app.sources.pickled import find_network, read_pickled
from lbyl.app.sources.zoo.weights import load_weights
from lbyl.errors import LbylError
from lbyl.runtime.format import first_line

SIZE = 640  # of images, where a file does not say what its network was trained on
LAYERS = ("torch.nn.", "ultralytics.nn.modules.")  # modules whose classes a recipe may name
ACTIVATION = re.compile(r"(?:torch\.)?nn\.(\w+)\([\w\s.,=+-]*\)")
QUIET = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}


@register("ultralytics", "ultralytics:NAME.yaml|WEIGHTS.pt", from_plan=True)
def from_ultralytics(name: str, word: str | None, classes: int | None) -> Network:
    """A network from the yaml of its layers, or from a file of weights with the yaml in it."""
    if word is not None:
        raise LbylError(f"weights of ultralytics are a file, not {word!r}")
    tasks = _tasks()
    if name.endswith((".yaml", ".yml")):
        return _network(_built(tasks, _recipe(tasks, name), None, classes, name), SIZE, None)
    path = Path(name)
    if path.suffix != ".pt":
        raise LbylError(f"ultralytics:{name}: name a .yaml of layers, or a .pt of weights")
    if not path.is_file():
        raise LbylError(f"there is no file {path}; nothing is fetched: download it first")
    data = read_pickled(path)
    stored = find_network(data)
    recipe = None if stored is None else stored.get("yaml")
    if stored is None or not isinstance(recipe, dict):
        raise LbylError(
            f"{path} holds tensors without the yaml of their network: "
            f"name ultralytics:NAME.yaml and give --weights {path}"
        )
    model = _built(tasks, recipe, stored.origin.rpartition(".")[2], classes, name)
    load_weights(model, path)
    names = stored.get("names")
    if isinstance(names, dict):
        model.names = {int(key): str(value) for key, value in names.items()}
    given = data.get("train_args") if isinstance(data, dict) else None
    size = given.get("imgsz", SIZE) if isinstance(given, dict) else SIZE
    return _network(model, size if isinstance(size, int) else SIZE, str(path))


def _network(model: Any, size: int, weights: str | None) -> Network:
    """It takes images between 0 and 1."""
    shape = (int(model.yaml.get("channels", model.yaml.get("ch", 3))), size, size)
    nothing, one = (0.0,) * shape[0], (1.0,) * shape[0]
    return Network("", model, torch.zeros(1, *shape), shape, nothing, one, weights)


def _tasks() -> Any:
    """The package's module of networks. Importing it asks the internet nothing."""
    with _environment(QUIET):
        return imported("ultralytics.nn.tasks", "detect")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update({key: value for key, value in values.items() if before[key] is None})
    try:
        yield
    finally:
        for key in (key for key, value in before.items() if value is None):
            os.environ.pop(key, None)


def _recipe(tasks: Any, name: str) -> dict[str, Any]:
    """The yaml of a name, or of a path: as Ultralytics finds it, whose names tell the scale."""
    try:
        recipe = tasks.yaml_model_load(name)
    except Exception as error:
        raise LbylError(f"ultralytics has no {name}: {first_line(error)}") from error
    if not isinstance(recipe, dict):
        raise LbylError(f"{name} is no yaml of a network")
    return recipe


def _built(
    tasks: Any, recipe: dict[str, Any], kind: str | None, classes: int | None, name: str
) -> Any:
    """The network of a recipe, with all that Ultralytics itself puts into it."""
    check_recipe(tasks, recipe, name)
    if classes is not None:
        recipe = {**recipe, "nc": classes}
    task = tasks.guess_model_task(recipe)
    model_class = getattr(tasks, kind, None) if kind else _class_for(task, recipe)
    if not (isinstance(model_class, type) and issubclass(model_class, tasks.BaseModel)):
        raise LbylError(f"{name} is of a class {kind!r} that this ultralytics has not")
    try:
        model = model_class(recipe, verbose=False)
    except Exception as error:  # the package raises many unrelated types for a wrong yaml
        raise LbylError(f"ultralytics cannot build {name}: {first_line(error)}") from error
    defaults = imported("ultralytics.utils", "detect").DEFAULT_CFG_DICT
    model.task, model.args = task, {**defaults, "task": task, "model": name}
    return model


def _class_for(task: str, recipe: dict[str, Any]) -> Any:
    """The class that the package has for a task."""
    package = imported("ultralytics", "detect")
    kind = package.RTDETR if "RTDETR" in str(recipe["head"][-1][2]) else package.YOLO
    table = kind.task_map.fget(None)  # it looks at nothing but the task
    return table[task]["model"]


def check_recipe(tasks: Any, recipe: Mapping[str, Any], name: str) -> None:
    """Refuse a recipe that names anything but layers: it would be called, or run as Python."""
    for row in [*_rows(recipe, "backbone", name), *_rows(recipe, "head", name)]:
        kind = str(row[2])
        home = torch if kind.startswith("nn.") else tasks
        found: Any = home
        for part in kind.split("."):
            found = getattr(found, part, None)
        is_layer = isinstance(found, type) and issubclass(found, nn.Module)
        if not is_layer or not found.__module__.startswith(LAYERS):
            raise LbylError(f"{name} names {kind!r}, which is no layer of torch or ultralytics")
    activation = recipe.get("activation")
    match = ACTIVATION.fullmatch(str(activation or "nn.ReLU()"))
    if match is None or not hasattr(torch.nn.modules.activation, match[1]):
        raise LbylError(f"{name} has the activation {activation!r}: write it as nn.SiLU()")


def _rows(recipe: Mapping[str, Any], part: str, name: str) -> list[Any]:
    rows = recipe.get(part)
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == 4 for r in rows):
        raise LbylError(f"{name} is no yaml of a network: it has no {part} of rows of four")
    return rows
