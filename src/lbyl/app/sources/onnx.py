"""ONNX files, as far as onnx2torch reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lbyl.app.sources.base import imported, register
from lbyl.app.sources.network import Network
from lbyl.app.sources.onnx_graph import readable
from lbyl.errors import LbylError
from lbyl.runtime.format import first_line

FREE = 1  # the length of a batch, and of every other dimension that a file leaves open


@register("onnx", "FILE.onnx", from_plan=True, own_weights=True, suffix=".onnx")
def from_onnx(name: str, word: str | None, classes: int | None) -> Network:
    """The graph of a file as a network of PyTorch, with the file's own weights."""
    if word is not None or classes is not None:
        raise LbylError(f"{name} brings its own weights and classes; leave the options out")
    path = Path(name)
    if not path.is_file():
        raise LbylError(f"there is no file {path}")
    onnx, reader = imported("onnx", "onnx"), imported("onnx2torch", None)
    try:
        model = readable(onnx.load(str(path)))
        entries = _inputs(model)
        shapes = [_shape(entry) for entry in entries]
    except Exception as error:  # a damaged file raises many unrelated types
        raise LbylError(f"{path} is no readable ONNX file: {first_line(error)}") from error
    if len(shapes) != 1:
        raise LbylError(f"{path} takes {len(shapes)} inputs: give its network as FILE.py:FUNCTION")
    try:
        made: torch.nn.Module = reader.convert(model)
    except Exception as error:  # what it does not know it tells in many unrelated types
        said = first_line(error) or type(error).__name__
        raise LbylError(f"onnx2torch does not read {path}: {said}") from error
    example = torch.zeros(FREE, *shapes[0])
    return Network("", made, example, shapes[0], weights=str(path), unsized=_open_sides(entries[0]))


def _inputs(model: Any) -> list[Any]:
    """What has to be given: older files list their weights among it."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [entry for entry in model.graph.input if entry.name not in weights]


def _shape(entry: Any) -> tuple[int, ...]:
    """Of one example, without the batch."""
    sizes = [dimension.dim_value or FREE for dimension in entry.type.tensor_type.shape.dim]
    return tuple(sizes[1:])


def _open_sides(entry: Any) -> bool:
    """Whether a file takes images of any size: of one pixel, most networks have nothing to say."""
    dimensions = entry.type.tensor_type.shape.dim
    return len(dimensions) == 4 and not all(dimension.dim_value for dimension in dimensions[2:])
