"""Where networks come from: torchvision, timm, the zoo, Transformers, a Python file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lbyl.errors import LbylError
from lbyl.models.network import WEIGHT_FILES, Network
from lbyl.models.zoo.registry import IMAGENET_MEAN, IMAGENET_STD
from lbyl.torchkit.files import read_json
from lbyl.torchkit.format import first_line
from lbyl.torchkit.run import example_shape

DEFAULT_SIZE = 224
TOKENS = 32  # length of the example sentence for networks that read token numbers


def _image_network(
    model: nn.Module,
    size: int = DEFAULT_SIZE,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    weights: str | None = None,
) -> Network:
    shape = guess_shape(model, size)
    example = torch.zeros(1, *shape)
    return Network("", model, example, shape, tuple(mean), tuple(std), weights)


def guess_shape(model: nn.Module, size: int = DEFAULT_SIZE) -> tuple[int, ...]:
    """Input shape by the first layer with weights: its channels, or its whole width if linear."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return (module.in_channels, size, size)
        if isinstance(module, nn.Linear):
            return (module.in_features,)
    return (3, size, size)


def _from_torchvision(name: str, word: str | None, classes: int | None) -> Network:
    models = _import("torchvision.models", "vision")
    if name not in models.list_models():
        raise _unknown(f"torchvision:{name}", models.list_models())
    known = models.get_model_weights(name)
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if word is not None:
        if word not in (*known.__members__, "DEFAULT"):
            listed = ", ".join(known.__members__) or "none"
            raise LbylError(f"{name} has no weights {word!r}; it has {listed}, or give a file")
        options["weights"] = known[word]
    model = _downloading(lambda: models.get_model(name, **options), f"torchvision:{name}")
    entry = known[word or "DEFAULT"] if len(known) else None
    transforms = entry.transforms() if entry is not None else None
    size = getattr(transforms, "crop_size", [DEFAULT_SIZE])[0]
    mean = getattr(transforms, "mean", IMAGENET_MEAN)
    std = getattr(transforms, "std", IMAGENET_STD)
    return _image_network(model, size, mean, std, word)


def _from_timm(name: str, word: str | None, classes: int | None) -> Network:
    timm = _import("timm", "vision")
    if word not in (None, "pretrained"):
        raise LbylError(f"timm's weights are a file or the word 'pretrained', not {word!r}")
    if name.split(".")[0] not in timm.list_models():
        raise _unknown(f"timm:{name}", timm.list_models())
    options = {} if classes is None else {"num_classes": classes}
    model = _downloading(
        lambda: timm.create_model(name, pretrained=word is not None, **options), f"timm:{name}"
    )
    config = timm.data.resolve_model_data_config(model)
    shape = tuple(config["input_size"])
    return Network(
        "", model, torch.zeros(1, *shape), shape, tuple(config["mean"]), tuple(config["std"]), word
    )


def _from_zoo(name: str, word: str | None, classes: int | None) -> Network:
    from lbyl.models import zoo

    if word not in (None, "shipped"):
        raise LbylError(f"weights of the zoo are a file or the word 'shipped', not {word!r}")
    if classes is not None:
        raise LbylError(f"lbyl:{name} has its number of classes already; leave --classes out")
    info = zoo.info(name)
    model = zoo.create(name, word)
    example = torch.zeros(1, *info.input_shape)
    return Network("", model, example, info.input_shape, info.mean, info.std, word)


def _from_transformers(name: str, word: str | None, classes: int | None) -> Network:
    transformers = _import("transformers", None)
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
    mean, std = _transformers_scale(Path(name))
    return Network("", model, {"pixel_values": torch.zeros(1, *shape)}, shape, mean, std, name)


def _transformers_scale(directory: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    path = directory / "preprocessor_config.json"
    known = read_json(path) if path.is_file() else {}
    mean = tuple(known.get("image_mean", IMAGENET_MEAN))
    return mean, tuple(known.get("image_std", IMAGENET_STD))


def _from_file(name: str, word: str | None, classes: int | None) -> Network:
    """A factory in a Python file of the user's own."""
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise LbylError(f"there is no file {path}; a model in Python is path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module, run = importlib.util.module_from_spec(spec), spec.loader.exec_module
    with _importing_from(path.resolve().parent):  # the file may import its neighbours
        return _from_factory(name, lambda: (run(module), module)[1], word, classes)


def _from_module(name: str, word: str | None, classes: int | None) -> Network:
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
    name: str, imported: Callable[[], Any], word: str | None, classes: int | None
) -> Network:
    """What a factory makes: a network, or a network and its example inputs."""
    path, _, function = name.rpartition(":")
    if word is not None:
        raise LbylError(f"weights {word!r}: give a {', '.join(WEIGHT_FILES)} file for a {path}")
    try:
        factory = getattr(imported(), function, None)
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
    network = _image_network(model)
    if not given:
        return network
    shape = example_shape(given[0])
    return replace(network, example=given[0], input_shape=shape)


def _downloading(make: Callable[[], Any], name: str) -> Any:
    """Run a factory that may fetch weights; without a network there is another way."""
    try:
        return make()
    except (OSError, RuntimeError) as error:
        raise LbylError(
            f"{name} cannot be made: {first_line(error)}; without a connection give a weights file"
        ) from error


def _unknown(name: str, known: Sequence[str]) -> LbylError:
    import difflib

    source, _, last = name.partition(":")
    near = difflib.get_close_matches(last, known, 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return LbylError(f"{source} has no model {last!r}{hint}")


def _import(module: str, extra: str | None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        command = f"pip install lbyl[{extra}]" if extra else f"pip install {package}"
        raise LbylError(f"this model needs {package}: {command}") from error


_MAKERS: dict[str, Callable[[str, str | None, int | None], Network]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "lbyl": _from_zoo,
    "hf": _from_transformers,
}
