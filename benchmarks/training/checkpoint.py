"""Checkpoints: two files of tensors and one of JSON, which no one has to trust."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor

from benchmarks.training.config import History, require
from benchmarks.training.data import length
from benchmarks.training.session import Session
from lbyl.errors import LbylError
from lbyl.runtime.files import telling

STATE_VERSION = 1
_INDIFFERENT = ("checkpoint_every", "eval_every", "eval_batch_size")  # to what is learned
_UNREADABLE = (
    *(OSError, KeyError, AttributeError, TypeError, SafetensorError),
    *(RuntimeError, ValueError),  # also nested without end, also no JSON or no text
)


@dataclass(frozen=True)
class Store:
    """A folder with one checkpoint in it, ``checkpoint-<epoch>``, replaced by the next."""

    folder: Path | None

    @classmethod
    def at(cls, out: str | Path | None, resume: bool) -> Store:
        store = cls(None if out is None else Path(out))
        latest = store.latest()
        if resume and latest is None:
            raise LbylError(f"nothing to resume: there is no checkpoint in {out}")
        if not resume and latest is not None:
            raise LbylError(
                f"{latest} is there already: give resume=True to go on from it, or another folder"
            )
        return store

    def latest(self) -> Path | None:
        if self.folder is None:
            return None
        found = sorted(self.folder.glob("checkpoint-*/state.json"))
        return found[-1].parent if found else None

    def save(self, session: Session, history: History) -> None:
        """Write the files aside and rename the folder, so that no half checkpoint is ever seen."""
        if self.folder is None:
            return
        if session.accelerator.is_main_process:
            with telling(self.folder):
                _write(self.folder, session, history)
        session.accelerator.wait_for_everyone()

    def restore(self, session: Session) -> History:
        """Put weights, momentum and history back as they were after the saved epoch."""
        folder = self.latest()
        assert folder is not None  # `at` has looked
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            history = History(dict(row) for row in state["history"])
            # Trained on from fewer epochs it would be written over itself, and not be the same run.
            require(folder.name == _name(history), f"its history has {len(history)} epochs")
            _check_same_run(state, _state(session, history))
            load_model(session.bare, folder / "model.safetensors")
            _put_momenta(session, load_file(folder / "optimizer.safetensors"))
            if session.accelerator.scaler is not None and state["scaler"]:
                session.accelerator.scaler.load_state_dict(state["scaler"])
        except _UNREADABLE as error:
            raise LbylError(f"{folder} cannot be resumed with this model: {error}") from error
        return history


def _write(folder: Path, session: Session, history: History) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    aside, target = folder / ".writing", folder / _name(history)
    shutil.rmtree(aside, ignore_errors=True)  # what an interrupted run left behind
    aside.mkdir()
    save_model(session.bare, str(aside / "model.safetensors"))
    save_file(_momenta(session), aside / "optimizer.safetensors")
    state = json.dumps(_state(session, history), indent=2)
    (aside / "state.json").write_text(state, encoding="utf-8")
    aside.replace(target)
    for old in folder.glob("checkpoint-*"):
        if old != target:
            shutil.rmtree(old)


def _name(history: History) -> str:
    return f"checkpoint-{len(history):06d}"


def _put_momenta(session: Session, momenta: dict[str, Tensor]) -> None:
    for name, parameter in session.bare.named_parameters():
        if name in momenta:
            # Laid out like the parameter, or the optimiser takes a slower way.
            buffer = torch.empty_like(parameter, requires_grad=False).copy_(momenta[name])
            session.optimizer.optimizer.state[parameter]["momentum_buffer"] = buffer


def _momenta(session: Session) -> dict[str, Tensor]:
    state = session.optimizer.optimizer.state
    buffers = {n: state[p].get("momentum_buffer") for n, p in session.bare.named_parameters()}
    return {name: buffer.contiguous() for name, buffer in buffers.items() if buffer is not None}


def _state(session: Session, history: History) -> dict[str, Any]:
    scaler = session.accelerator.scaler
    return {
        "version": STATE_VERSION,
        "epoch": len(history),
        "step": len(history) * session.steps,
        "seed": session.config.seed,
        "images": length(session.data),
        "config": asdict(session.config),
        "scaler": None if scaler is None else scaler.state_dict(),
        "history": list(history),
    }


def _check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """A schedule and an order continued under other settings would be neither run."""
    now = json.loads(json.dumps(now))  # tuples as lists, as they come back from the file
    before, after = ({**s["config"], "images": s["images"]} for s in (saved, now))
    changed = [
        f"{key} was {before.get(key)}, is {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in _INDIFFERENT
    ]
    require(saved["version"] == STATE_VERSION, f"checkpoint version {saved['version']} is unknown")
    require(not changed, "cannot resume a run with another setting: " + "; ".join(changed))
