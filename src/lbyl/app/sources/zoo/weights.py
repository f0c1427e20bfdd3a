"""Reading a state dict from a file into a network, with every disagreement said at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from lbyl.app.sources.pickled import HOLDERS, find_network, read_pickled, state_of
from lbyl.errors import LbylError
from lbyl.runtime.files import read_tensors

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
    data = read_pickled(path)
    network = find_network(data)
    if network is not None:
        return state_of(network)
    held = [data.get(key) for key in HOLDERS] if isinstance(data, dict) else []
    for state in (*held, data):  # checkpoints of training scripts wrap it under a name
        if isinstance(state, dict) and all(isinstance(v, Tensor) for v in state.values()):
            return state
    raise LbylError(f"{path} holds no state dict (a mapping from names to tensors)")


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
