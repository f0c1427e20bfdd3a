"""Directories of Transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lbyl.app.sources.base import DEFAULT_SIZE, imported, register
from lbyl.app.sources.network import Network
from lbyl.app.sources.zoo.registry import IMAGENET_MEAN, IMAGENET_STD
from lbyl.errors import LbylError
from lbyl.runtime.files import read_json
from lbyl.runtime.format import first_line
from lbyl.storage.configs import quiet

TOKENS = 32  # length of the example sentence for networks that read token numbers


TASKS = {
    "fill-mask": "MASKED_LM",
    "text-generation": "CAUSAL_LM",
    "text2text-generation": "SEQ_TO_SEQ_CAUSAL_LM",
    "text-classification": "SEQUENCE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "image-classification": "IMAGE_CLASSIFICATION",
    "audio-classification": "AUDIO_CLASSIFICATION",
    "image-segmentation": "SEMANTIC_SEGMENTATION",
    "object-detection": "OBJECT_DETECTION",
    "feature-extraction": "",
}
"""Task → Transformers' table of the classes with its head; the last one has none."""


def with_task(name: str, task: str | None) -> str:
    """The name of a network with the task that its head is for: `hf:DIRECTORY#text-generation`."""
    if task is None:
        return name
    if not name.startswith("hf:"):
        raise LbylError(f"--task {task}: it is of hf:DIRECTORY; {name} has its head already")
    if task not in TASKS:
        raise LbylError(f"--task {task!r}: it is one of {', '.join(TASKS)}")
    return f"{name}#{task}"


def directory_and_task(name: str) -> tuple[str, str | None]:
    """The directory that a name is of, and the task in it."""
    directory, _, task = name.rpartition("#")
    return (directory, task) if directory and task in TASKS else (name, None)


def class_names(config: Any, task: str) -> list[str]:
    """Classes of Transformers that have the head of a task, for the network of a configuration."""
    tables: Any = imported("transformers.models.auto.modeling_auto", "text")
    kind = f"_FOR_{TASKS[task]}" if TASKS[task] else ""
    found = getattr(tables, f"MODEL{kind}_MAPPING_NAMES", {}).get(config.model_type, ())
    return [found] if isinstance(found, str) else list(found)


def _loaded(config: Any, directory: str, task: str | None) -> tuple[Any, tuple[str, ...]]:
    """The network with the head that its weights hold, and what there is to say of that."""
    transformers = imported("transformers", "text")
    listed = (getattr(config, "architectures", None) or [""])[0]
    if task is not None:
        names = class_names(config, task)
        if not names:
            raise LbylError(f"transformers has no {task} for {config.model_type}: name another")
    else:
        names = [listed] if hasattr(transformers, listed or " ") else []
    if names:
        model, missing, unused = _read(getattr(transformers, names[0]), directory)
        return model, _differences(missing, unused)
    candidates = dict.fromkeys(name for word in TASKS for name in class_names(config, word))
    for name in candidates:
        try:
            model, missing, unused = _read(getattr(transformers, name), directory)
        except Exception:  # a head of another size, say
            continue
        if not missing and not unused:
            break
    else:
        model, missing, unused = _read(transformers.AutoModel, directory)
    why = f"names {listed}, which transformers does not have" if listed else "names no architecture"
    note = f"config.json {why}: taken as {type(model).__name__}; --task NAME takes another head"
    return model, (note, *_differences(missing, unused))


def _read(kind: Any, directory: str) -> tuple[Any, list[str], list[str]]:
    """A network, weights that were missing and are random, and weights that it does not use."""
    with quiet():
        model, told = kind.from_pretrained(
            directory, local_files_only=True, output_loading_info=True
        )
    return model, sorted(told["missing_keys"]), sorted(told["unexpected_keys"])


def _differences(missing: list[str], unused: list[str]) -> tuple[str, ...]:
    """Weights that the network has and the file has not, and the other way round."""
    lines = []
    if missing:
        lines.append(f"not among the weights, and random: {_some(missing)}")
    if unused:
        lines.append(f"among the weights, and not used: {_some(unused)}; --task takes a head")
    return tuple(lines)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@register("hf", "hf:DIRECTORY", own_weights=True)
def from_transformers(name: str, word: str | None, classes: int | None) -> Network:
    transformers = imported("transformers", "text")
    directory, task = directory_and_task(name)
    if not (Path(directory) / "config.json").is_file():
        raise LbylError(f"{directory} is no directory of transformers: it has no config.json")
    if word is not None or classes is not None:
        raise LbylError("hf:DIRECTORY brings its own weights and classes; leave the options out")
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        model, notes = _loaded(config, directory, task)
    except LbylError:
        raise
    except Exception as error:  # transformers raises many unrelated types
        raise LbylError(f"transformers cannot load {directory}: {first_line(error)}") from error
    return replace(_fed(config, model, directory), notes=notes)


def _fed(config: Any, model: Any, name: str) -> Network:
    """The network with an example of its inputs: tokens or images."""
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
