"""A slim network back in Ultralytics' hands: its `val`, `export`, `predict` and `train` go on."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lbyl.app.sources.base import imported
from lbyl.errors import LbylError
from lbyl.runtime.files import whole_file

WORKFLOW = "yolo.pt"  # what `lbyl compress` calls the file that Ultralytics opens


def is_ultralytics(model: nn.Module) -> bool:
    """Whether a network is one of the package's own classes."""
    return type(model).__module__.startswith("ultralytics.")


def write_yolo(model: nn.Module, path: str | Path) -> Path:
    """Write a network in Ultralytics' own format, for `yolo val model=…` and `yolo export model=…`.

    It is a pickle of the package's classes, as all of its files are: open it where you trust it.
    """
    if not is_ultralytics(model):
        raise LbylError(f"a {type(model).__name__} is no network of ultralytics")
    whole = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    given: Any = getattr(model, "args", None)
    args = dict(given if isinstance(given, dict) else vars(given) if given else {})
    path = Path(path)
    with whole_file(path) as temporary:
        torch.save({"model": whole, "ema": None, "train_args": args}, temporary)
    return path


def as_yolo(model: nn.Module, path: str | Path = WORKFLOW) -> Any:
    """A `YOLO` (or `RTDETR`) object around a slim network, which is written to `path`.

    `val`, `predict`, `export` and `save` are the package's own. So is `train`, but that it goes on
    with this network: the package alone builds one anew from its yaml, at the original's widths.
    """
    yolo: Any = imported("ultralytics", "detect").YOLO(str(write_yolo(model, path)))
    yolo.train = functools.partial(_train, yolo, yolo.train)
    return yolo


def _train(yolo: Any, train: Any, trainer: Any = None, **options: Any) -> Any:
    make = trainer or yolo._smart_load("trainer")

    def keeping(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if getattr(made, "world_size", 1) > 1:  # further processes would build it from its yaml
            raise LbylError("a slim network is trained by ultralytics on one device: device=0")
        made.get_model = functools.partial(_slim, yolo.model, made.data)
        return made

    return train(trainer=keeping, **options)


def _slim(model: nn.Module, data: dict[str, Any], *args: Any, **kwargs: Any) -> nn.Module:
    """The network itself in the place of a fresh one."""
    classes, wanted = len(getattr(model, "names", ())), data.get("nc")
    if wanted is not None and classes != wanted:
        raise LbylError(
            f"the network knows {classes} classes and the data has {wanted}: "
            "train the original on them first, then make it smaller"
        )
    return copy.deepcopy(model).requires_grad_(True)
