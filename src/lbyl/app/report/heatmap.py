"""Delivery matrices made small enough to embed, for the page to paint."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lbyl.errors import LbylError

LIMIT = 128  # rows and columns that are painted


def downsample(matrix: Tensor, limit: int = LIMIT) -> Tensor:
    """At most `limit` rows and columns; of each block the entry of largest magnitude stays.

    A mean would wash out exactly what a delivery shows: few large entries among many small ones.
    """
    for axis in (0, 1):
        size = matrix.shape[axis]
        if size > limit:
            block = -(-size // limit)
            parts = [_strongest(part, axis) for part in matrix.split(block, axis)]
            matrix = torch.stack(parts, axis)
    return matrix


def _strongest(block: Tensor, axis: int) -> Tensor:
    return block.gather(axis, block.abs().argmax(axis, keepdim=True)).squeeze(axis)


def packed(delivery: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every matrix as the page paints it; one that was packed before stays as it is."""
    return [
        dict(matrix) if isinstance(matrix, Mapping) else pack(str(name), matrix)
        for name, matrix in delivery.items()
    ]


def pack(name: str, values: Any) -> dict[str, Any]:
    """A matrix as signed bytes in base64, with its own size and the value that 127 stands for."""
    matrix = torch.as_tensor(values).detach().cpu().double()
    if matrix.dim() != 2 or not matrix.numel():
        raise LbylError(
            f"the delivery of {name!r} must be a matrix (channels × kept), not of shape "
            f"{tuple(matrix.shape)}"
        )
    rows, columns = matrix.shape
    small = downsample(torch.nan_to_num(matrix, nan=0.0, posinf=0.0, neginf=0.0))
    scale = float(small.abs().max()) or 1.0
    levels = (small / scale * 127).round().to(torch.int8).numpy()
    return {
        "unit": name,
        "channels": rows,
        "kept": columns,
        "rows": small.shape[0],
        "columns": small.shape[1],
        "scale": scale,
        "data": base64.b64encode(levels.tobytes()).decode("ascii"),
    }
