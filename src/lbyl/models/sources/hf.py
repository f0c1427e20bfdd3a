"""Directories of Transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from lbyl.errors import LbylError
from lbyl.models.network import Network
from lbyl.models.sources.base import DEFAULT_SIZE, imported, register
from lbyl.models.zoo.registry import IMAGENET_MEAN, IMAGENET_STD
from lbyl.torchkit.files import read_json
from lbyl.torchkit.format import first_line

TOKENS = 32  # length of the example sentence for networks that read token numbers


@register("hf", "hf:DIRECTORY", own_weights=True)
def from_transformers(name: str, word: str | None, classes: int | None) -> Network:
    transformers = imported("transformers", "text")
    if not (Path(name) / "config.json").is_file():
        raise LbylError(f"{name} is no directory of transformers: there is no config.json in it")
    if word is not None or classes is not None:
        raise LbylError("hf:DIRECTORY brings its own weights and classes; leave the options out")
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        # The class that was saved keeps its head; AutoModel alone would drop it.
        listed = getattr(config, "architectures", None) or [""]
        model_class = getattr(transformers, listed[0], transformers.AutoModel)
        model = model_class.from_pretrained(name, local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types
        raise LbylError(f"transformers cannot load {name}: {first_line(error)}") from error
    if hasattr(config, "vocab_size"):
        tokens = torch.arange(TOKENS).remainder(config.vocab_size)[None]
        tokens[0, -1] = config.vocab_size - 1  # one above it is the number of tokens
        return Network("", model, {"input_ids": tokens}, (TOKENS,), weights=name)
    size = getattr(config, "image_size", None) or DEFAULT_SIZE
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    shape = (getattr(config, "num_channels", 3), *sides)
    mean, std = _scale(Path(name))
    return Network("", model, {"pixel_values": torch.zeros(1, *shape)}, shape, mean, std, name)


def _scale(directory: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    path = directory / "preprocessor_config.json"
    known = read_json(path) if path.is_file() else {}
    mean = tuple(known.get("image_mean", IMAGENET_MEAN))
    return mean, tuple(known.get("image_std", IMAGENET_STD))
