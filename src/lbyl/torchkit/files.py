"""Files: safetensors and JSON only, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from lbyl.errors import LbylError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place only when all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _make_ordinary(temporary, 0o666)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _make_ordinary(path: Path, mode: int) -> None:
    """Temporary files are private; a result is as readable as anything its user makes."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(mode & ~umask)


@contextmanager
def whole_directory(path: Path, last: str = "") -> Iterator[Path]:
    """A temporary directory whose files go to `path` only when all are written.

    A new directory appears at once. In one that exists our files are replaced one by one, each
    atomically, the one named `last` after all others; nothing else in it is touched.
    """
    path = path.resolve()  # a link stays one: what it points to is written to
    if path.exists() and not path.is_dir():
        raise LbylError(f"{path} is a file; give a directory to write to")
    exists = path.is_dir()
    parent = path if exists else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{path.name}."))
    except OSError as error:
        raise LbylError(f"{path} cannot be written to: {error}") from error
    try:
        yield temporary
        if exists:
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == last):
                file.replace(path / file.name)
        else:
            _make_ordinary(temporary, 0o777)
            temporary.replace(path)
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
    except (ValueError, RecursionError) as error:  # no JSON, no text, or nested without end
        raise LbylError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise LbylError(f"{path} cannot be read: {error}") from error
