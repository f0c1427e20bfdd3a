"""Look at the procedural images: a contact sheet in one file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.inputs.procedural import procedural_images


def preview(
    path: str | os.PathLike[str] = "preview.png",
    count: int = 64,
    shape: Sequence[int] = (3, 32, 32),
    seed: int = 0,
    images: Tensor | None = None,
) -> Path:
    """Write a contact sheet of ``images`` (or of fresh procedural ones) and return its path."""
    from PIL import Image

    path = Path(path)
    if images is None:
        images = procedural_images(count, shape, seed=seed)
    sheet = contact_sheet(images[:count])
    picture = Image.fromarray(sheet.numpy())
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind is None:
        raise LbylError(f"{path}: the name must end like an image file, for example .png")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there, so that nobody ever sees half a file.
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    try:
        with os.fdopen(handle, "wb") as stream:
            picture.save(stream, format=kind)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def contact_sheet(images: Tensor, gap: int = 2) -> Tensor:
    """Tile (n, C, H, W) into one uint8 picture (height, width, 3), from −2.5 to 2.5 deviations.

    Three or more channels show the first three as colour; fewer show the first as grey.
    """
    if images.ndim != 4 or len(images) == 0:
        raise LbylError(f"a contact sheet needs images (n, C, H, W), not {tuple(images.shape)}")
    images = images.detach().float().cpu()
    picked = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    deviation, mean = torch.std_mean(picked, correction=0)
    shown = ((picked - mean) / deviation.clamp_min(1e-8) / 5 + 0.5).clamp(0, 1) * 255
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    height, width = shown.shape[2] + gap, shown.shape[3] + gap
    cells = torch.full((rows * columns, 3, height, width), 255.0)
    cells[: len(shown), :, : height - gap, : width - gap] = shown
    grid = cells.view(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    sheet = grid.reshape(rows * height, columns * width, 3)
    return sheet[: rows * height - gap, : columns * width - gap].round().byte().contiguous()
