"""Files: safetensors and JSON only, written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lbyl.errors import LbylError

PAIRS = "complex128"  # names of tensors that the file holds as pairs of real numbers: it knows none

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """What the file system refuses (full, read-only, gone) as one error that names the path."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise LbylError(f"{path} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # it tells of the file system in its own way
        raise LbylError(f"{path} cannot be written: {error}") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place only when all is written."""
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path, path.parent)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        try:
            yield temporary
            temporary.chmod(mode)  # some writers put a private file of their own in its place
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _beside(path: Path, folder: Path) -> Path:
    """A hidden name that nothing has; what is made there gets the modes that its user's files get.

    `tempfile` makes private ones, and asking for the umask changes it for all threads.
    """
    return folder / f".{path.name}.{secrets.token_hex(6)}"


@contextmanager
def whole_directory(path: Path, last: str = "", stale: Sequence[str] = ()) -> Iterator[Path]:
    """A temporary directory whose files go to `path` only when all are written.

    A new directory appears at once. In one that exists our files are replaced one by one, each
    atomically, the one named `last` after all others; files of the names in `stale` go, unless they
    are written anew, and nothing else in the directory is touched.
    """
    path = path.resolve()  # a link stays one: what it points to is written to
    if path.exists() and not path.is_dir():
        raise LbylError(f"{path} is a file; give a directory to write to")
    exists = path.is_dir()
    parent = path if exists else path.parent
    with telling(path), _alone_in(path if exists else None):
        parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path, parent)
        temporary.mkdir()
        try:
            yield temporary
            if exists:
                written = {file.name for file in temporary.iterdir()}
                for name in set(stale) - written:
                    (path / name).unlink(missing_ok=True)
                for file in sorted(temporary.iterdir(), key=lambda file: file.name == last):
                    file.replace(path / file.name)
            else:
                temporary.replace(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _alone_in(path: Path | None) -> Iterator[None]:
    """One writer at a time in a directory: files of two would be mixed.

    The lock lies on the directory itself and ends with its process, so that nothing is left behind.
    """
    if path is None or fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems know no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LbylError(
                    f"{path} is being written by another process: wait, or give another directory"
                ) from None
        yield
    finally:
        os.close(handle)


def write_tensors(path: Path, values: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write tensors as safetensors, atomically; complex ones in double precision as pairs."""
    from safetensors.torch import save_file

    ready = {name: value.detach().cpu().contiguous() for name, value in values.items()}
    pairs = [name for name, value in ready.items() if value.dtype == torch.complex128]
    ready |= {name: torch.view_as_real(ready[name].resolve_conj()) for name in pairs}
    noted = {PAIRS: json.dumps(pairs)} if pairs else {}
    with whole_file(path) as temporary:
        save_file(ready, str(temporary), {**notes, **noted})


def read_tensors(
    path: Path, complaint: str = "is damaged"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a safetensors file and its notes, with one clear error where that fails."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            names, notes = file.keys(), file.metadata()
            values = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise LbylError(f"{path} {complaint}: {error}") from error
    notes = notes or {}
    try:
        pairs = json.loads(notes.pop(PAIRS, "[]"))
        values |= {name: torch.view_as_complex(values[name].clone()) for name in pairs}
    except (ValueError, RecursionError, TypeError, KeyError, RuntimeError) as error:
        raise LbylError(f"{path} {complaint}: it misnames complex numbers") from error
    return values, notes


def write_json(path: Path, data: Any) -> None:
    """Write JSON, atomically."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON, with one clear error where that fails."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LbylError(f"there is no {path.name} in {path.parent}") from None
    except (ValueError, RecursionError) as error:  # no JSON, no text, or nested without end
        raise LbylError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise LbylError(f"{path} cannot be read: {error}") from error
