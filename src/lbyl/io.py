"""Files: safetensors and JSON only, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lbyl.exceptions import LbylError
from lbyl.plan import Plan
from lbyl.surgery import refit_attributes, replace_tensors, tensors, weightless_copy

if TYPE_CHECKING:
    from lbyl.result import Result

MODEL, PLAN = "model.safetensors", "plan.json"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place only when all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes private files; a result is as readable as anything its user makes.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that takes the place of `path` only when all is written.

    What `path` held under other names is kept, so a second run adds to the first.
    """
    path = path.resolve()  # a link stays one: what it points to is replaced
    if path.exists() and not path.is_dir():
        raise LbylError(f"{path} is a file; give a directory to write to")
    if path.is_dir() and (path.is_mount() or Path.cwd().is_relative_to(path)):
        with _filled_directory(path) as temporary:
            yield temporary
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    old = temporary.with_name(temporary.name + ".old")
    try:
        if path.exists():
            shutil.copytree(path, temporary, dirs_exist_ok=True)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        if path.exists():
            path.replace(old)
        temporary.replace(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.replace(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _filled_directory(path: Path) -> Iterator[Path]:
    """For directories that cannot be renamed: finished files are moved in one by one."""
    temporary = Path(tempfile.mkdtemp(dir=path, prefix=".writing."))
    try:
        yield temporary
        for file in temporary.iterdir():
            file.replace(path / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_tensors(path: Path, values: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write tensors as safetensors, atomically."""
    from safetensors.torch import save_file

    ready = {name: value.detach().cpu().contiguous() for name, value in values.items()}
    with whole_file(path) as temporary:
        save_file(ready, str(temporary), dict(notes))


def read_tensors(
    path: Path, complaint: str = "is damaged"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a safetensors file and its notes, with one clear error where that fails."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise LbylError(f"{path} {complaint}: {error}") from error


def write_json(path: Path, data: Any) -> None:
    """Write JSON, atomically."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON, with one clear error where that fails."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise LbylError(f"there is no {path.name} in {path.parent}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LbylError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise LbylError(f"{path} cannot be read: {error}") from error


def save(result: Result, directory: str | Path) -> Path:
    """Write `model.safetensors` and `plan.json`; the directory is either the old or the new."""
    path = Path(directory)
    with whole_directory(path) as temporary:
        write_tensors(temporary / MODEL, tensors(result.model), {"format": "pt"})
        write_json(temporary / PLAN, plan_document(result))
    return path


def plan_document(result: Result) -> dict[str, Any]:
    """What plan.json holds: the plan, the original sizes, and what came of it."""
    shapes = {name: list(shape) for name, shape in result.graph.shapes.items()}
    return {**result.plan.to_dict(), "shapes": shapes, "result": result.to_dict(plan=False)}


def load(directory: str | Path, model: nn.Module) -> nn.Module:
    """Give a freshly constructed network of the original class the slim shapes and weights.

    The network given is changed only when everything fits; it is also returned.
    """
    path = Path(directory)
    document = read_json(path / PLAN)
    plan = Plan.from_dict(document)
    if not (path / MODEL).is_file():
        raise LbylError(f"there is no {MODEL} in {path}")
    values, _ = read_tensors(path / MODEL)
    _check_original(model, document.get("shapes", {}))
    _check_fits(model, values, plan)
    before = _shell(model)
    replace_tensors(model, values)
    refit_attributes(model, before)
    return model


def _shell(model: nn.Module) -> nn.Module:
    """The model's structure and sizes, kept for comparison while its tensors are replaced."""
    return weightless_copy(model, {})


def _check_original(model: nn.Module, shapes: Any) -> None:
    """The network must have the sizes that the one compressed had before."""
    if not isinstance(shapes, Mapping):
        raise LbylError("the plan's 'shapes' must give a shape for every parameter")
    here = tensors(model)
    for name, shape in shapes.items():
        if name in here and list(here[name].shape) != shape:
            raise LbylError(
                f"the saved model does not belong to this network: {name} was {shape} before "
                f"compression and is {list(here[name].shape)} here"
            )


def _check_fits(model: nn.Module, values: Mapping[str, Tensor], plan: Plan) -> None:
    """Every saved tensor must have its place, no larger than the original."""
    here = tensors(model)
    missing = [name for name in here if name not in values]
    # A bias may be new: restoration writes one where a consumer had none.
    extra = [n for n in values if n not in here and not _is_new_bias(model, n)]
    if missing or extra:
        names = ", ".join((missing + extra)[:4])
        raise LbylError(f"the saved model does not belong to this network: {names} do not match")
    for name, value in values.items():
        old = here.get(name)
        if old is None:
            continue
        if old.dim() != value.dim() or any(a > b for a, b in zip(value.shape, old.shape)):
            raise LbylError(
                f"the saved model does not belong to this network: {name} is "
                f"{tuple(value.shape)} there and {tuple(old.shape)} here"
            )
    for name, channels in plan.channels.items():
        weight = here.get(f"{name}.weight", here.get(name))
        if weight is None:
            raise LbylError(f"the plan prunes {name!r}, which this network does not have")
        if channels > max(weight.shape[:2], default=0) and weight.dim():
            raise LbylError(
                f"the plan expects {channels} channels in {name!r}, this network has fewer"
            )


def _is_new_bias(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return False
    return last == "bias" and "bias" in module._parameters
