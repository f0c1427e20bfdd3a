"""Reading a state dict from a file into a network, with every disagreement said at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.torchkit.files import read_tensors

_SHOWN = 5  # keys of each kind in an error: enough to see the pattern, few enough to read


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a state dict (``.safetensors``, ``.pth``, ``.pt``, ``.ckpt``) into ``model``, return it.

    Each tensor takes the type of the one it replaces, so matrices stored in half precision become
    float32. Keys must agree exactly, except that BatchNorm's step counter may be absent: it has
    no part in inference and many published files leave it out.
    """
    own = model.state_dict()
    state = _without_prefix(read_state_dict(Path(path)), own)
    problems = _disagreements(own, state)
    if problems:
        where = f"{path} does not fit {type(model).__name__}"
        raise LbylError(where + "".join(f"\n  {line}" for line in problems))
    model.load_state_dict({key: own[key] if key not in state else state[key] for key in own})
    return model


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file. No code stored in the file is ever run."""
    if not path.is_file():
        raise LbylError(f"no weights file at {path}")
    if path.suffix == ".safetensors":
        return read_tensors(path, "is not a readable safetensors file")[0]
    if path.suffix in {".pth", ".pt", ".ckpt", ".bin"}:
        return _read_torch(path)
    raise LbylError(f"{path}: weights must be a .safetensors, .pth, .pt, .ckpt or .bin file")


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many unrelated types for a damaged or unsafe file
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LbylError(
            f"{path} is not a plain PyTorch state dict: {first}; a file that holds a whole model "
            "runs code when it is read: load it where you trust it, and save model.state_dict()"
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # checkpoints of training scripts wrap it under this name
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise LbylError(f"{path} holds no state dict (a mapping from names to tensors)")
    return state


def _without_prefix(state: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys less what a wrapper put before all: DataParallel `module.`, Lightning `model.`.

    Only where the network itself has no key that begins so.
    """
    prefix = next(iter(state), "").partition(".")[0] + "."
    wraps = all(key.startswith(prefix) for key in state)
    if not wraps or any(key.startswith(prefix) for key in own):
        return state
    return {key[len(prefix) :]: value for key, value in state.items()}


def _disagreements(own: dict[str, Tensor], state: dict[str, Tensor]) -> list[str]:
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k} (file {tuple(state[k].shape)}, network {tuple(own[k].shape)})"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
    return [f"{kind}: {_some(keys)}" for kind, keys in kinds.items() if keys]


def _some(keys: Iterable[str]) -> str:
    keys = list(keys)
    more = f", and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
