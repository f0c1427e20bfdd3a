"""A result on disk: `model.safetensors` and `plan.json`, without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from warnings import warn

from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.patterns import names_attention
from lbyl.planning.plan import Plan
from lbyl.result import Result
from lbyl.runtime.files import read_json, read_tensors, whole_directory, write_json, write_tensors
from lbyl.runtime.notes import noting
from lbyl.runtime.tensors import tensors
from lbyl.storage.configs import CONFIG, TIMM, beside, described, source_of, write_config
from lbyl.surgery.cut import weightless_copy
from lbyl.surgery.layout import (
    fits_layout,
    is_layout,
    present_attributes,
    put_in_place,
    set_attributes,
    whole_numbers,
)
from lbyl.surgery.modules.experts import split_experts, split_in_place
from lbyl.surgery.modules.masked import can_be_masked
from lbyl.surgery.refit import refit_attributes

MODEL, PLAN = "model.safetensors", "plan.json"
REPORT, SHOWN = "report.html", "report.json"
ONNX, INT8, EXECUTORCH = "model.onnx", "model.int8.onnx", "model.pte"
YOLO = "yolo.pt"
TENSORS, ATTRIBUTES = "tensors", "attributes"  # of plan.json, and noted beside the weights
SAVED = "lbyl"  # under which they are noted
ABOUT = (REPORT, SHOWN, ONNX, f"{ONNX}.data", INT8, EXECUTORCH)
"""Files made from the weights, which are out of date with others."""


def save(result: Result, directory: str | Path) -> Path:
    """Write `model.safetensors` and `plan.json`; the directory is either the old or the new.

    A network of Transformers gets the `config.json` of its new sizes beside them, where one can
    say them, so that `from_pretrained` loads it without this library. What could not be written
    beside weights and plan is a warning, and stands in the plan under "notes".
    """
    path = Path(directory)
    with whole_directory(path, last=PLAN, stale=outdated(path)) as temporary:
        with noting() as notes:
            write_network(result, temporary)
        document = plan_document(result, temporary / MODEL)
        write_json(temporary / PLAN, {**document, "notes": notes} if notes else document)
    for line in notes:
        warn(line, stacklevel=2)
    return path


def outdated(path: Path) -> tuple[str, ...]:
    """Names of files that are of the network which a directory held so far."""
    return (*ABOUT, CONFIG, TIMM, YOLO) if (path / PLAN).is_file() else ()


def write_network(result: Result, folder: Path, source: Path | None = None) -> list[str]:
    """Write the weights, and what Transformers needs to load them; the names of the files."""
    made = described(result.model, result.plan, result.example)
    values = tensors(result.model if made is None else made)
    if made is not None:  # what is computed when the network is built is not stored
        stored = made.state_dict().keys()
        values = {name: x for name, x in values.items() if name in stored}
    notes = notes_beside(values, present_attributes(result.model))
    write_tensors(folder / MODEL, values, notes)
    names = [MODEL]
    if made is not None:
        with beside(CONFIG):
            names += write_config(made, source or source_of(result.model), folder)
    return names


def plan_document(result: Result, weights: Path) -> dict[str, Any]:
    """What plan.json says: the plan, the sizes before and after, and what came of it.

    `weights` is the file of the slim network's tensors.
    """
    shapes = {name: list(shape) for name, shape in result.graph.shapes.items()}
    sizes = {"shapes": shapes, TENSORS: contents(read_tensors(weights)[0])}
    document = {**result.plan.to_dict(), **sizes, "result": result.to_dict(plan=False)}
    attributes = present_attributes(result.model)
    return {**document, ATTRIBUTES: attributes} if attributes else document


def contents(values: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shape of every tensor; of those that say how slim layers lie, what they say."""
    return {n: x.tolist() if is_layout(n) else list(x.shape) for n, x in values.items()}


def load(directory: str | Path, model: nn.Module) -> nn.Module:
    """Give a freshly constructed network of the original class the slim shapes and weights.

    The network given is changed only when everything fits; it is also returned.
    """
    values, attributes, apart = checked(Path(directory), model)
    if apart:
        split_in_place(model, apart)
    before = _shell(model)
    put_in_place(model, values)
    refit_attributes(model, before)
    set_attributes(model, attributes)
    return model


def checked(
    path: Path, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, dict[str, int]], set[str]]:
    """What a directory has for this network: tensors, attributes, which experts lie apart.

    One clear error where its files contradict each other or the network, which stays as it is.
    """
    document = read_json(path / PLAN)
    plan = Plan.from_dict(document)
    if not (path / MODEL).is_file():
        raise LbylError(f"there is no {MODEL} in {path}")
    values, notes = read_tensors(path / MODEL)
    whole = tensors(model)
    # Experts of different widths are saved apart, and those of equal ones in one tensor.
    split = {n.rpartition(".")[0] for n in values if n not in whole} & whole.keys()
    apart = {name.rpartition(".")[0] for name in split}
    like = split_experts(model, apart) if apart else model
    _check_original(like, document.get("shapes", {}))
    _check_fits(like, values, plan)
    said = _said(document, notes)
    if said.get(TENSORS) is not None and said[TENSORS] != contents(values):
        raise LbylError(
            f"the saved model is damaged: tensors in {path / MODEL} do not have the shapes that "
            "they were saved with; save the network again"
        )
    return values, _checked_attributes(like, said.get(ATTRIBUTES, {})), apart


def _said(document: Mapping[str, Any], notes: Mapping[str, str]) -> Mapping[str, Any]:
    """What was saved: as it is noted beside the weights, else as the plan has it.

    The weights come first: of a process that was killed between the two files they may be newer.
    """
    if SAVED not in notes:
        return document
    try:
        said = json.loads(notes[SAVED])
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise LbylError(f"the saved model is damaged: the note in {MODEL} is not JSON")
    return said


def notes_beside(values: Mapping[str, Tensor], attributes: Any) -> dict[str, str]:
    """What is noted in the file of weights: Transformers' word for torch, and what was saved."""
    said = {TENSORS: contents(values), ATTRIBUTES: attributes}
    return {"format": "pt", SAVED: json.dumps(said)}


def _shell(model: nn.Module) -> nn.Module:
    """The model's structure and sizes, kept for comparison while its tensors are replaced."""
    return weightless_copy(model)


def _check_original(model: nn.Module, shapes: Any) -> None:
    """The network must have the sizes that the one compressed had before."""
    if not isinstance(shapes, Mapping):
        raise LbylError("the plan's 'shapes' must give a shape for every parameter")
    here, stored = tensors(model), model.state_dict().keys()  # others grow and are made anew
    for name, shape in shapes.items():
        if name in here and name in stored and list(here[name].shape) != shape:
            raise LbylError(
                f"the saved model does not belong to this network: {name} was {shape} before "
                f"compression and is {list(here[name].shape)} here"
            )


def _check_fits(model: nn.Module, values: Mapping[str, Tensor], plan: Plan) -> None:
    """Every saved tensor must fit a tensor of the model, no larger than the original."""
    here = tensors(model)
    stored = model.state_dict().keys()  # other buffers are computed when a network is built
    missing = [name for name in here if name not in values and name in stored]
    # A bias may be new: restoration writes one where a consumer had none.
    extra = [n for n in values if n not in here and not _is_new(model, n)]
    if missing or extra:
        names = ", ".join((missing + extra)[:4])
        raise LbylError(f"the saved model does not belong to this network: {names} do not match")
    for name, value in values.items():
        old = here.get(name)
        if old is None:
            if is_layout(name) and not fits_layout(name, value, values):
                raise LbylError(
                    f"the saved model is damaged: {name} says places that are not there"
                )
            continue
        if _kind(old) != _kind(value):
            raise LbylError(f"the saved model is damaged: {name} holds {value.dtype}")
        larger = name in stored and any(a > b for a, b in zip(value.shape, old.shape))
        if old.dim() != value.dim() or larger:
            raise LbylError(
                f"the saved model does not belong to this network: {name} is "
                f"{tuple(value.shape)} there and {tuple(old.shape)} here"
            )
    # How many channels a unit has says nothing of the layer it is named after: several layers may
    # make them, or each row a part of one.
    for name in plan.channels:
        stacked = name.rpartition(".")[0]  # of which an expert is one
        held = names_attention(name) or {f"{name}.weight", name, stacked} & here.keys()
        if not held:
            raise LbylError(f"the plan prunes {name!r}, which this network does not have")


def _kind(x: Tensor) -> tuple[bool, bool]:
    return x.is_floating_point(), x.is_complex()


def _checked_attributes(model: nn.Module, given: Any) -> dict[str, dict[str, Any]]:
    """Numbers of heads and widths by module, each of an attribute that the module has."""
    modules = dict(model.named_modules())
    wrong = LbylError("the plan's 'attributes' must be whole numbers of modules of this network")
    if not isinstance(given, Mapping):
        raise wrong
    for module, values in given.items():
        if module not in modules or not isinstance(values, Mapping):
            raise wrong
        for name, value in values.items():
            here, there = whole_numbers(vars(modules[module]).get(name)), whole_numbers(value)
            if not there or len(here) != len(there) or min(there) < 0:
                raise wrong
    return {module: dict(values) for module, values in given.items()}


def _is_new(model: nn.Module, name: str) -> bool:
    """Whether a cut can have added a tensor of this name."""
    owner, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return False
    if is_layout(name):
        return can_be_masked(module) or isinstance(module, nn.MultiheadAttention)
    return last == "bias" and "bias" in module._parameters
