"""A `config.json` that says the new sizes, so that Transformers loads a slim network by itself.

Which entry says which size is found by trial: whole numbers of the configuration that follow what
was pruned are changed, one or a few at a time, until the network that Transformers builds from it
has the slim network's shapes and computes the same.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.planning.plan import Plan
from lbyl.runtime.copies import deep_copy
from lbyl.runtime.files import read_json, write_json
from lbyl.runtime.format import first_line
from lbyl.runtime.notes import note
from lbyl.runtime.run import Inputs, call_model, evaluation_mode, tensors_in
from lbyl.runtime.session import OwnDraws

CONFIG, TIMM = "config.json", "timm.txt"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".index.json", ".py")
TRIALS, TOGETHER = 200, 3  # configurations that are tried, and entries that change at once
EQUAL = 1e-4  # of the largest output

Entry = tuple[str, ...]  # of an entry, through configurations within others


@contextmanager
def beside(name: str) -> Iterator[None]:
    """A file beside the weights, which are saved whatever its making does: then a note is left.

    Configurations and classes are the user's own code, and may fail in any way. What the file
    system refuses is an error, as it is for the weights.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, OSError):
            raise
        note(f"{name} was not written: {type(error).__name__}: {first_line(error)}")


def config_of(model: nn.Module) -> Any:
    """The configuration that a network was built from; None where it has none."""
    return getattr(model, "config", None)


def can_be_described(model: nn.Module) -> bool:
    """Whether the network is built from a configuration of Transformers."""
    return all(hasattr(config_of(model), name) for name in ("to_dict", "from_dict", "model_type"))


def described(model: nn.Module, plan: Plan, example: Inputs = None) -> nn.Module | None:
    """The slim network as Transformers builds it from a changed configuration.

    None where no configuration says its sizes: widths that differ by layer, say. The network of
    Transformers of which that is so is noted.
    """
    made = None
    with beside(CONFIG):
        if can_be_described(model):
            inputs = example if example is not None else getattr(model, "dummy_inputs", None)
            made = _built_alike(model, plan, inputs)
            if made is None:
                note(why_not(plan))
    return made


def _built_alike(model: nn.Module, plan: Plan, inputs: Inputs) -> nn.Module | None:
    """The network of the first configuration that gives the same shapes and outputs."""
    before = config_of(model).to_dict()
    for changes in itertools.islice(_changes(before, plan), TRIALS):
        built = _built(model, _changed(before, changes), meta=True)
        if built is None or not _same_shapes(model, built):
            continue
        for biases in (changes, *_with_biases(before, changes)):
            made = _filled(model, _changed(before, biases))
            if made is not None and _computes_the_same(model, made, inputs):
                return made
    return None


def described_shapes(
    model_class: Any, config: Any, plan: Plan, shapes: Mapping[str, tuple[int, ...]]
) -> dict[Entry, Any] | None:
    """Entries to change so that a network of this class has these shapes; None where none do.

    Tensors that the network ties to others may be missing.
    """
    before = config.to_dict()
    for changes in itertools.islice(_changes(before, plan), TRIALS):
        try:
            with torch.device("meta"), quiet():
                built = model_class(type(config).from_dict(_changed(before, changes)))
        except Exception:  # a configuration that contradicts itself may fail in any way
            continue
        there = {name: tuple(x.shape) for name, x in built.state_dict().items()}
        tied = set(there) - set(dict(built.named_parameters())) - set(dict(built.named_buffers()))
        if shapes.items() <= there.items() and there.keys() - tied <= shapes.keys():
            return changes
    return None


def _entries(config: Mapping[str, Any], path: Entry = ()) -> Iterator[tuple[Entry, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _entries(value, (*path, name))
        else:
            yield (*path, name), value


def _changes(config: Mapping[str, Any], plan: Plan) -> Iterator[dict[Entry, Any]]:
    """Ways of saying what was pruned, the likeliest first: no change, one entry, several."""
    sizes = {(plan.channels[name], len(kept)) for name, kept in plan.kept.items()}
    sizes = {(old, new) for old, new in sizes if new < old}
    exact: list[tuple[Entry, Any]] = []
    scaled: list[tuple[Entry, Any]] = []
    unsaid: list[tuple[Entry, Any]] = []
    for (old, new), (path, value) in itertools.product(sorted(sizes), _entries(config)):
        if value is None and "token" not in path[-1]:
            unsaid.append((path, new))
        elif type(value) is int and value == old:
            exact.append((path, new))
        elif type(value) is int and value > 1 and (value * Fraction(new, old)).denominator == 1:
            scaled.append((path, int(value * Fraction(new, old))))
    likely = [*exact, *(x for x in scaled if "token" not in x[0][-1]), *unsaid]
    for count in range(TOGETHER + 1):
        for several in itertools.combinations(likely if count < 2 else [*exact, *scaled], count):
            if len({path for path, _ in several}) == count:
                yield dict(several)


def _with_biases(
    config: Mapping[str, Any], changes: dict[Entry, Any]
) -> Iterator[dict[Entry, Any]]:
    """The same with biases where the configuration can ask for them."""
    for path, value in _entries(config):
        if value is False and "bias" in path[-1]:
            yield {**changes, path: True}


def _changed(config: Mapping[str, Any], changes: Mapping[Entry, Any]) -> dict[str, Any]:
    made = copy.deepcopy(dict(config))
    for path, value in changes.items():
        inner = made
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
    return made


def _built(model: nn.Module, config: Mapping[str, Any], meta: bool) -> nn.Module | None:
    """The network of this configuration; None where there is no such network."""
    kind = type(config_of(model))
    try:
        with torch.device("meta" if meta else "cpu"), OwnDraws(), quiet():
            made = type(model)(kind.from_dict(dict(config)))
    except Exception:  # a configuration that contradicts itself may fail in any way
        return None
    return made if isinstance(made, nn.Module) else None


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers tells of every network that it builds; of trials nobody wants to know."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _same_shapes(model: nn.Module, built: nn.Module) -> bool:
    """Whether all tensors have the same shape, but for biases that restoration has added."""
    here = {name: x.shape for name, x in model.state_dict().items()}
    there = {name: x.shape for name, x in built.state_dict().items()}
    extra = here.keys() - there.keys()
    return there.keys() <= here.keys() and all(
        name.endswith(".bias") if name in extra else shape == there[name]
        for name, shape in here.items()
    )


def _filled(model: nn.Module, config: Mapping[str, Any]) -> nn.Module | None:
    """The network of this configuration with the slim network's weights, which are not copied."""
    made = _built(model, config, meta=False)
    if made is None:
        return None
    values = dict(model.state_dict())
    values |= {name: x.clone() for name, x in model.named_buffers() if name in values}
    for name, x in made.state_dict().items():
        if name not in values and name.endswith(".bias"):
            values[name] = torch.zeros_like(x, dtype=next(iter(values.values())).dtype)
    if values.keys() != made.state_dict().keys():
        return None
    try:
        made.load_state_dict(values, assign=True)
    except RuntimeError:  # another shape
        return None
    tie: Any = getattr(made, "tie_weights", None)
    if tie is not None:
        tie()
    return made.train(model.training)


@torch.no_grad()
def _computes_the_same(model: nn.Module, made: nn.Module, inputs: Inputs) -> bool:
    """Shapes do not tell numbers of heads from their width; outputs do."""
    if inputs is None:
        return False
    made = made.to(next(model.parameters()).device)
    wanted = _outputs(model, inputs)
    try:
        there = _outputs(made, inputs)
    except Exception:  # a network of another configuration may fail in any way
        return False
    return len(there) == len(wanted) and all(map(_close, wanted, there))


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What a network gives; a copy of it runs, for some write into their buffers."""
    twin = deep_copy(model, {id(x): x for x in model.parameters()})
    with evaluation_mode(twin):
        return [x for x in tensors_in(call_model(twin, inputs)) if x.is_floating_point()]


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return float((a - b).abs().max()) <= EQUAL * float(a.abs().max().clamp(min=1e-6))


# --------------------------------------------------------------------------------------- on disk


@torch.no_grad()
def timm_text(original: nn.Module, slim: nn.Module, example: Inputs) -> str | None:
    """The slim network's shapes as timm writes them, so that timm rebuilds it by itself.

    None where what it rebuilds is not the slim network: a bias was added, say.
    """
    from timm.models._prune import adapt_model_from_string

    shapes = {name: ",".join(map(str, x.shape)) for name, x in slim.state_dict().items()}
    text = "***".join(f"{name}:[{shape}]" for name, shape in shapes.items())
    try:
        made = adapt_model_from_string(original, text)
        made.load_state_dict(slim.state_dict())
    except Exception:  # timm changes the network by trial, and may fail in any way
        return None
    return text if _computes_the_same(slim, made, example) else None


def write_config(made: nn.Module, source: Path | None, folder: Path) -> list[str]:
    """Write `config.json`, and what else a directory of Transformers had; the names of the files.

    Tokenisers and preprocessing are carried over; weights, code and old sizes are not.
    """
    config = json.loads(config_of(made).to_json_string())
    config["architectures"] = [type(made).__name__]
    if source is not None and (source / CONFIG).is_file():
        kept = read_json(source / CONFIG)
        config = {**{k: v for k, v in kept.items() if k not in config}, **config}
    write_json(folder / CONFIG, config)
    return [CONFIG, *carry(source, folder)]


def carry(source: Path | None, folder: Path) -> list[str]:
    """Copy a directory's files but for weights, code and sizes."""
    names = []
    for file in sorted(source.iterdir()) if source is not None and source.is_dir() else []:
        ours = file.name in (CONFIG, "plan.json", "report.html", "README.md")
        if file.is_file() and not ours and not file.name.endswith(WEIGHTS):
            try:
                content = file.read_bytes()
            except OSError as error:
                note(f"{file} was not carried over: {error.strerror}")
                continue
            (folder / file.name).write_bytes(content)
            names.append(file.name)
    return names


def source_of(model: nn.Module) -> Path | None:
    """The directory that a network was loaded from."""
    name = getattr(config_of(model), "_name_or_path", "")
    return Path(name) if name and (Path(name) / CONFIG).is_file() else None


def why_not(plan: Plan) -> str:
    """One sentence for a network that no configuration describes."""
    widths: dict[int, set[int]] = {}
    for name, kept in plan.kept.items():
        widths.setdefault(plan.channels[name], set()).add(len(kept))
    differ = any(len(several) > 1 for several in widths.values())
    reason = (
        "widths differ by layer: prune all by the same ratio ('*=0.3')"
        if differ
        else "it has sizes or biases of its own: --option new_bias=False adds no biases"
    )
    return (
        f"no config.json can describe this network ({reason}); "
        "it is loaded by lbyl.load into the original network"
    )
