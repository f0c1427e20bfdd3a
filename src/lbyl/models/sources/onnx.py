"""ONNX files, as far as onnx2torch reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lbyl.errors import LbylError
from lbyl.models.network import Network
from lbyl.models.sources.base import imported, register
from lbyl.torchkit.format import first_line

OPSET = 17  # the newest that onnx2torch knows all of
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
        model = _older(onnx, onnx.load(str(path)))
        shapes = [_shape(entry) for entry in _inputs(model)]
        made: torch.nn.Module = reader.convert(model)
    except NotImplementedError as error:
        raise LbylError(f"onnx2torch does not read {path}: {first_line(error)}") from error
    except Exception as error:  # a damaged file raises many unrelated types
        raise LbylError(f"{path} is no readable ONNX file: {first_line(error)}") from error
    if len(shapes) != 1:
        raise LbylError(f"{path} takes {len(shapes)} inputs: give its network as FILE.py:FUNCTION")
    return Network("", made, torch.zeros(FREE, *shapes[0]), shapes[0], weights=str(path))


def _older(onnx: Any, model: Any) -> Any:
    """The same in a version that the reader knows."""
    version = max((o.version for o in model.opset_import if not o.domain), default=0)
    if version > OPSET:
        model = imported("onnx.version_converter", "onnx").convert_version(model, OPSET)
    for node in model.graph.node:
        if node.op_type == "Reshape":  # says what a length of 0 means: nothing here is empty
            kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend(kept)
    return model


def _inputs(model: Any) -> list[Any]:
    """What has to be given: older files list their weights among it."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [entry for entry in model.graph.input if entry.name not in weights]


def _shape(entry: Any) -> tuple[int, ...]:
    """Of one example, without the batch."""
    sizes = [dimension.dim_value or FREE for dimension in entry.type.tensor_type.shape.dim]
    return tuple(sizes[1:])
