"""Programs that load what was written, ready to be copied."""

from __future__ import annotations

import json
from pathlib import Path

from lbyl.app.sources import Network
from lbyl.app.sources.hf import directory_and_task
from lbyl.app.sources.kinds import source_of
from lbyl.storage.configs import CONFIG


def loading(network: Network, out: str | Path) -> list[str]:
    """Python that loads what was written, ready to use."""
    source, _ = source_of(network.name)
    place = quoted(out)
    if source is not None and source.from_plan:  # plan.json says which network it was
        return ["import lbyl", f"model = lbyl.load({place})"]
    if source is not None and source.prefix == "hf" and (Path(out) / CONFIG).is_file():
        kind = type(network.model).__name__
        return [f"from transformers import {kind}", f"model = {kind}.from_pretrained({place})"]
    classes = "" if network.classes is None else f", classes={network.classes}"
    made = f"resolve({quoted(network.name)}{classes}).model"
    lines = ["import lbyl", "from lbyl.app.sources import resolve"]
    return [*lines, f"model = lbyl.load({place}, model={made}).eval()"]


def quoted(text: str | Path) -> str:
    """A text as Python writes it, between double quotes."""
    return json.dumps(str(text), ensure_ascii=False)


def construction(network: Network) -> str | None:
    """Python that builds the network of the original size as `original`, without this library.

    None where its class says enough.
    """
    source, name = source_of(network.name)
    classes = "" if network.classes is None else f", num_classes={network.classes}"
    kind = "" if source is None else source.prefix
    if kind == "timm":
        return f"import timm\noriginal = timm.create_model({quoted(name)}{classes})"
    if kind == "torchvision":
        none = "weights=None" + ", weights_backbone=None" * hasattr(network.model, "backbone")
        made = f"get_model({quoted(name)}, {none}{classes})"
        return f"from torchvision.models import get_model\noriginal = {made}"
    if kind == "hf":
        place, model = quoted(directory_and_task(name)[0]), type(network.model).__name__
        lines = [f"from transformers import AutoConfig, {model}"]
        return "\n".join([*lines, f"original = {model}(AutoConfig.from_pretrained({place}))"])
    if source is None and ":" in name:
        return _factory(name, network.classes)
    if kind in ("ultralytics", "onnx", "smp"):
        return "# Build the network as before it was compressed.\noriginal = build_network()"
    return None


def _factory(name: str, classes: int | None) -> str:
    """Lines that call a factory in a file, or in a module of the directory that is worked in."""
    module, _, function = name.rpartition(":")
    path = Path(module).resolve() if module.endswith(".py") else Path.cwd() / module
    stem = path.stem if module.endswith(".py") else module
    lines = [
        "import importlib",
        "import sys",
        "",
        f"sys.path.insert(0, {quoted(path.parent)})",
        f"made = importlib.import_module({quoted(stem)}).{function}({classes or ''})",
        "original = made[0] if isinstance(made, tuple) else made",
    ]
    return "\n".join(lines)
