"""Look at the procedural images: a contact sheet in one file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.inputs.images.procedural import procedural_images
from lbyl.runtime.files import whole_file


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
    picture = Image.fromarray(contact_sheet(images[:count]).numpy())
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind is None:
        raise LbylError(f"{path}: the name must end like an image file, for example .png")
    with whole_file(path) as temporary:
        picture.save(temporary, format=kind)
    return path


def contact_sheet(images: Tensor, gap: int = 2) -> Tensor:
    """Tile (n, C, H, W) into one uint8 picture (height, width, 3), from −2.5 to 2.5 deviations.

    Three or more channels show the first three as colour; fewer show the first as grey.
    """
    from torchvision.utils import make_grid

    if images.ndim != 4 or len(images) == 0:
        raise LbylError(f"a contact sheet needs images (n, C, H, W), not {tuple(images.shape)}")
    images = images.detach().float().cpu()
    picked = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    std, mean = torch.std_mean(picked, correction=0)
    shown = ((picked - mean) / std.clamp_min(1e-8) / 5 + 0.5).clamp(0, 1)
    columns = math.ceil(math.sqrt(len(shown)))
    grid = make_grid(shown, nrow=columns, padding=gap, pad_value=1.0)
    if len(shown) > 1:  # a single image gets no frame
        grid = grid[:, gap:-gap, gap:-gap]
    return (grid * 255).round().byte().permute(1, 2, 0).contiguous()
