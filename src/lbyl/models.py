"""Networks by name, as the command line names them: where one comes from, and what it reads.

A name is `torchvision:resnet50`, `timm:mobilenetv2_100`, `lbyl:vgg16_cifar10`, `hf:DIRECTORY`,
`path/to/file.py:factory`, or a directory that `lbyl compress` wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.exceptions import LbylError
from lbyl.io import PLAN, load, read_json
from lbyl.record import Inputs
from lbyl.zoo import load_weights
from lbyl.zoo.registry import IMAGENET_MEAN, IMAGENET_STD

FORMS = (
    "torchvision:NAME, timm:NAME, lbyl:NAME, hf:DIRECTORY, path/to/file.py:FUNCTION "
    "or a directory written by lbyl compress"
)
DEFAULT_SIZE = 224
WEIGHT_FILES = (".safetensors", ".pth", ".pt")
TOKENS = 32  # length of the example sentence for networks that read token numbers


@dataclass(frozen=True)
class Network:
    """A network with what is needed to feed it."""

    name: str
    model: nn.Module
    example: Inputs
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    weights: str | None = None  # None: as the factory made it, which mostly means untrained
    classes: int | None = None  # None: as many as the architecture has of itself

    @property
    def flatten(self) -> bool:
        """Whether images are given to the network as vectors."""
        return len(self.input_shape) == 1

    @property
    def image_size(self) -> int | None:
        return self.input_shape[-1] if len(self.input_shape) == 3 else None

    def to(self, device: str | torch.device) -> Network:
        """The same on another device; the model itself is moved."""
        example = torch.utils._pytree.tree_map_only(Tensor, lambda x: x.to(device), self.example)
        return replace(self, model=self.model.to(device), example=example)

    def scaled(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> Network:
        """The same with another normalisation of its inputs, where one is given."""
        return replace(self, mean=tuple(mean or self.mean), std=tuple(std or self.std))

    def describe(self) -> dict[str, Any]:
        """What another run needs to build the network again, as plain data."""
        return {
            "name": self.name,
            "input_shape": list(self.input_shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "weights": self.weights,
            "classes": self.classes,
        }


def resolve(
    name: str,
    weights: str | Path | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
) -> Network:
    """Build the network that `name` and `weights` describe, in evaluation mode on the CPU.

    `weights` is a state dict (`.safetensors`, `.pth`, `.pt`), a directory of `lbyl compress`, or
    a word the source knows: torchvision's `IMAGENET1K_V1`, timm's `pretrained`, lbyl's `shipped`.
    """
    if (Path(name) / PLAN).is_file():
        return _from_directory(Path(name), weights, classes)
    kind, _, rest = name.partition(":")
    maker = _MAKERS.get(kind) if rest else None
    if maker is None and ".py:" in name:
        maker, rest = _from_file, name
    if maker is None:
        raise LbylError(f"no model is named {name!r}; name one as {FORMS}")
    word = None if weights is None or _is_path(weights) else str(weights)
    network = maker(rest, word, classes)
    if weights is not None and word is None:
        _fill(network.model, Path(weights))
        network = replace(network, weights=str(weights))
    network.model.eval()
    if input_shape is not None and kind != "hf":
        shape = _completed(tuple(input_shape), network.input_shape)
        network = replace(network, input_shape=shape, example=torch.zeros(1, *shape))
    return replace(network, name=name, classes=classes)


def parse_input_shape(text: str) -> tuple[int, ...]:
    """`224`, `1x28x28` or `784x` as a shape; a lone number is the side of a square image."""
    parts = text.lower().replace("×", "x").replace(",", "x").split("x")
    try:
        shape = tuple(int(part) for part in parts if part.strip())
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise LbylError(f"input size {text!r}: write 224 for square images, or 3x224x224")
    return shape


def _completed(shape: tuple[int, ...], known: tuple[int, ...]) -> tuple[int, ...]:
    """A lone number is a side for networks of images, and the whole width for others."""
    if len(shape) == 1 and len(known) == 3:
        return (known[0], shape[0], shape[0])
    return shape


def _is_path(weights: str | Path) -> bool:
    path = Path(weights)
    return path.suffix in WEIGHT_FILES or path.exists() or len(path.parts) > 1


def _fill(model: nn.Module, path: Path) -> None:
    if path.is_dir():
        load(path, model)
    else:
        load_weights(model, path)


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
    from lbyl import zoo

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
        chosen = getattr(transformers, listed[0], transformers.AutoModel)
        model = chosen.from_pretrained(name, local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types
        raise LbylError(f"transformers cannot load {name}: {first_line(error)}") from error
    if hasattr(config, "vocab_size"):
        tokens = torch.arange(TOKENS).remainder(config.vocab_size)[None]
        tokens[0, -1] = config.vocab_size - 1  # the largest tells how many there are
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
    import importlib.util
    import sys

    path, _, function = name.rpartition(":")
    if word is not None:
        raise LbylError(f"weights {word!r}: give a {', '.join(WEIGHT_FILES)} file for a {path}")
    if not Path(path).is_file():
        raise LbylError(f"there is no file {path}; a model in Python is path/to/file.py:function")
    folder = str(Path(path).resolve().parent)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
        factory = getattr(module, function, None)
        if not callable(factory):
            raise LbylError(f"{path} has no function {function!r} that makes a model")
        model = factory() if classes is None else factory(classes)
    except LbylError:
        raise
    except Exception as error:
        raise LbylError(f"{name} failed: {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise LbylError(f"{name} gave a {type(model).__name__}, not a torch.nn.Module")
    return _image_network(model)


def _from_directory(path: Path, weights: str | Path | None, classes: int | None) -> Network:
    """A compressed network. Its plan says which network it was, but never which code to run."""
    if weights is not None:
        raise LbylError(f"{path} has its weights already; leave --weights out")
    known = read_json(path / PLAN).get("network") or {}
    name = str(known.get("name", ""))
    if not name.startswith(("torchvision:", "timm:", "lbyl:")):
        what = f"comes from {name}" if name else "does not say which network it was"
        raise LbylError(f"{path} {what}: name the model itself and give --weights {path}")
    network = resolve(name, path, known.get("input_shape"), known.get("classes") or classes)
    return replace(network.scaled(known.get("mean"), known.get("std")), name=str(path))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        how = f"pip install lbyl[{extra}]" if extra else f"pip install {package}"
        raise LbylError(f"this model needs {package}: {how}") from error


_MAKERS: dict[str, Callable[[str, str | None, int | None], Network]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "lbyl": _from_zoo,
    "hf": _from_transformers,
}
