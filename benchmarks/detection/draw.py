"""A detection set drawn by formula, in COCO's format.

It stands in for COCO where COCO cannot be had: shapes to tell apart, textures that say nothing of
the class, clutter behind, objects in front of each other, and all three of COCO's size ranges.
Every image follows from (seed, split, number) alone, so any part can be drawn anywhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lbyl.errors import LbylError
from lbyl.runtime.files import whole_file

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
FORMATS = {"png": ".png", "jpeg": ".jpg"}
MAX_SIZE = 1024
LEAST_VISIBLE = 0.35  # an object more hidden than this is no longer asked for
LEAST_PIXELS = 40
PART = 64  # images that one process draws in one go

# Sides in pixels, chosen for the areas that COCO calls small (below 32²), medium (below 96²) and
# large. The greatest may be wider than a small image, and is then seen in part.
SMALL, MEDIUM, LARGE_FROM = (11.0, 32.0), (38.0, 84.0), 125.0
SIZE_FRACTIONS = (0.42, 0.42, 0.16)


@dataclass(frozen=True)
class DrawConfig:
    """What to draw."""

    images: int = 1000
    size: int = 128
    seed: int = 0
    max_objects: int = 6
    format: str = "png"

    def __post_init__(self) -> None:
        if self.images < 1 or self.max_objects < 1:
            raise LbylError("at least one image and one object an image must be asked for")
        if not 64 <= self.size <= MAX_SIZE:
            raise LbylError(f"size must lie between 64 and {MAX_SIZE}, not {self.size}")
        if self.format not in FORMATS:
            raise LbylError(f"format {self.format!r} is none of {tuple(FORMATS)}")


def draw_detection_set(
    folder: str | Path,
    config: DrawConfig | None = None,
    split: str = "train",
    executor: Executor | None = None,
) -> Path:
    """Draw ``folder/<split>/*.png`` and ``folder/annotations/instances_<split>.json``.

    Gives the path of the annotations, which are written last: where they are, all is there. With
    an ``executor`` parts are drawn side by side; the files are the same.
    """
    config = config or DrawConfig()
    images_dir = Path(folder) / split
    images_dir.mkdir(parents=True, exist_ok=True)
    starts = range(1, config.images + 1, PART)
    parts = [range(start, min(start + PART, config.images + 1)) for start in starts]
    drawing = executor.map if executor is not None else map
    drawn = drawing(partial(_draw_part, images_dir, config, split), parts)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, objects in enumerate((objects for part in drawn for objects in part), start=1):
        side, name = config.size, _file_name(config, number)
        images.append({"id": number, "file_name": name, "width": side, "height": side})
        for item in objects:
            key = {"id": len(annotations) + 1, "image_id": number, "iscrowd": 0}
            annotations.append({**key, **item})
    return _write_annotations(Path(folder), split, images, annotations)


def _draw_part(
    images_dir: Path, config: DrawConfig, split: str, numbers: range
) -> list[list[dict[str, Any]]]:
    """Draw and save some images; gives the objects of each."""
    from PIL import Image

    drawn = []
    for number in numbers:
        pixels, objects = draw_image(config, split, number)
        # Each format heeds its own option and ignores the other's.
        path = images_dir / _file_name(config, number)
        Image.fromarray(pixels).save(path, quality=95, compress_level=1)
        drawn.append(objects)
    return drawn


def _file_name(config: DrawConfig, number: int) -> str:
    return f"{number:012d}{FORMATS[config.format]}"


def _write_annotations(
    folder: Path, split: str, images: list[dict[str, Any]], annotations: list[dict[str, Any]]
) -> Path:
    categories = [
        {"id": number, "name": name, "supercategory": "shape"}
        for number, name in enumerate(CLASSES, start=1)
    ]
    content = {
        "info": {"description": "drawn shapes", "version": "1"},
        "images": images,
        "annotations": annotations,
        "categories": categories,
    }
    target = folder / "annotations" / f"instances_{split}.json"
    with whole_file(target) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")
    return target


def draw_image(
    config: DrawConfig, split: str, number: int
) -> tuple[npt.NDArray[np.uint8], list[dict[str, Any]]]:
    """One image (H, W, 3) and its objects: category_id, bbox of what is visible, visible area."""
    rng = np.random.default_rng([config.seed, zlib.crc32(split.encode()), number])
    side = config.size
    canvas = _background(rng, side)
    owner = np.zeros((side, side), dtype=np.int16)  # which object shows at each pixel
    drawn: list[tuple[int, int]] = []  # class, pixels before anything covered it
    for extent in _extents(rng, config):
        label = int(rng.integers(len(SHAPES)))
        window, mask = _placed(rng, SHAPES[label], extent, side)
        pixels = int(mask.sum())
        if pixels < LEAST_PIXELS or not _leaves_others_visible(owner[window], mask, owner, drawn):
            continue
        drawn.append((label, pixels))
        owner[window][mask] = len(drawn)
        texture = _texture(rng, *mask.shape)
        canvas[window][mask] = texture[mask]
    canvas += rng.normal(0, 4, (side, side, 1)).astype(np.float32)
    return np.clip(canvas, 0, 255).astype(np.uint8), _visible(owner, drawn)


def _extents(rng: np.random.Generator, config: DrawConfig) -> list[float]:
    """Sides in pixels, the greatest first, so that small objects lie in front and stay visible."""
    count = int(rng.integers(1, config.max_objects + 1))
    ranges = (SMALL, MEDIUM, (LARGE_FROM, 1.35 * max(config.size, LARGE_FROM)))
    sides = [rng.uniform(*ranges[kind]) for kind in rng.choice(3, size=count, p=SIZE_FRACTIONS)]
    return sorted(sides, reverse=True)


def _leaves_others_visible(
    here: npt.NDArray[np.int16],
    mask: Mask,
    owner: npt.NDArray[np.int16],
    drawn: list[tuple[int, int]],
) -> bool:
    """Whether all objects behind would still show enough of themselves to be found."""
    hidden = np.bincount(here[mask], minlength=len(drawn) + 1)[1:]
    if not hidden.any():
        return True
    shown = np.bincount(owner.ravel(), minlength=len(drawn) + 1)[1:] - hidden
    wanted = [max(LEAST_PIXELS, LEAST_VISIBLE * pixels) for _, pixels in drawn]
    return bool((shown >= wanted).all())


def _visible(owner: npt.NDArray[np.int16], drawn: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Boxes and areas as COCO has them: tight around the pixels that can be seen."""
    objects = []
    for number, (label, _) in enumerate(drawn, start=1):
        mask = owner == number
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        top, left = int(rows[0]), int(columns[0])
        height, width = int(rows[-1]) - top + 1, int(columns[-1]) - left + 1
        box = [float(left), float(top), float(width), float(height)]
        objects.append({"category_id": label + 1, "bbox": box, "area": float(mask.sum())})
    return objects


# ---------------------------------------------------------------------------------------------
# Shapes: from coordinates in [-1, 1]² to a mask


def _disc(u: Floats, v: Floats) -> Mask:
    return np.asarray(u * u + v * v < 1)


def _square(u: Floats, v: Floats) -> Mask:
    return np.asarray(np.maximum(abs(u), abs(v)) < 0.8)


def _triangle(u: Floats, v: Floats) -> Mask:
    return np.asarray((v < 0.6) & (1.732 * abs(u) - v < 1.0))


def _star(u: Floats, v: Floats) -> Mask:
    # Radius falls from 1 at a point to 0.42 halfway between two points.
    angle = np.arctan2(v, u) * (5 / (2 * np.pi))
    return np.asarray(np.hypot(u, v) < 1 - 1.16 * abs(angle - np.round(angle)))


def _ring(u: Floats, v: Floats) -> Mask:
    radius = u * u + v * v
    return np.asarray((radius < 1) & (radius > 0.33))


def _cross(u: Floats, v: Floats) -> Mask:
    return np.asarray((np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 0.95))


def _crescent(u: Floats, v: Floats) -> Mask:
    return np.asarray((u * u + v * v < 1) & ((u - 0.5) ** 2 + v * v > 0.6))


def _bar(u: Floats, v: Floats) -> Mask:
    return np.asarray((abs(u) < 0.97) & (abs(v) < 0.3))


Shape = Callable[[Floats, Floats], Mask]
SHAPES: tuple[Shape, ...] = (_disc, _square, _triangle, _star, _ring, _cross, _crescent, _bar)
CLASSES = tuple(shape.__name__.lstrip("_") for shape in SHAPES)


def _placed(
    rng: np.random.Generator, shape: Shape, extent: float, side: int
) -> tuple[tuple[slice, slice], Mask]:
    """A turned, slightly stretched shape somewhere in the image; parts outside are cut off."""
    radius = extent / 2
    # The greatest may reach over the edges, the others lie inside.
    margin = min(radius, 0.45 * side)
    cy, cx = rng.uniform(margin, side - margin, size=2)
    top, left = max(0, int(cy - radius)), max(0, int(cx - radius))
    bottom, right = min(side, int(cy + radius) + 2), min(side, int(cx + radius) + 2)
    y = (np.arange(top, bottom, dtype=np.float32)[:, None] - np.float32(cy)) / radius
    x = (np.arange(left, right, dtype=np.float32)[None, :] - np.float32(cx)) / radius
    angle, stretch = rng.uniform(0, 2 * np.pi), rng.uniform(1.0, 1.25)
    u = (np.cos(angle) * x + np.sin(angle) * y) * stretch
    v = np.cos(angle) * y - np.sin(angle) * x
    mask = shape(u.astype(np.float32), v.astype(np.float32))
    return (slice(top, bottom), slice(left, right)), mask


# ---------------------------------------------------------------------------------------------
# Textures: none of them tells the class


def _grid(height: int, width: int) -> tuple[Floats, Floats]:
    return (
        np.arange(height, dtype=np.float32)[:, None],
        np.arange(width, dtype=np.float32)[None, :],
    )


def _pattern(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Values in [0, 1] (H, W): flat, stripes, checks, dots, a slope or grain."""
    y, x = _grid(height, width)
    period = np.float32(rng.uniform(4, 14))
    angle = rng.uniform(0, np.pi)
    along = np.float32(np.cos(angle)) * x + np.float32(np.sin(angle)) * y
    kind = int(rng.integers(6))
    if kind == 0:
        return np.zeros((height, width), dtype=np.float32)
    if kind == 1:
        return np.asarray(0.5 + 0.5 * np.sin(along * (2 * np.pi / period)), dtype=np.float32)
    if kind == 2:
        return np.asarray((np.floor(y / period) + np.floor(x / period)) % 2, dtype=np.float32)
    if kind == 3:
        dots = np.hypot(y % period - period / 2, x % period - period / 2) < period * 0.3
        return np.asarray(dots, dtype=np.float32)
    if kind == 4:
        slope = along - along.min()
        return np.asarray(slope / max(1.0, float(slope.max())), dtype=np.float32)
    return rng.random((height, width), dtype=np.float32)


def _texture(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Two colours mixed by a pattern (H, W, 3)."""
    first = rng.uniform(0, 255, 3).astype(np.float32)
    second = np.clip(first + rng.uniform(-110, 110, 3), 0, 255).astype(np.float32)
    weight = _pattern(rng, height, width)[..., None]
    return np.asarray(first + weight * (second - first), dtype=np.float32)


def _background(rng: np.random.Generator, side: int) -> Floats:
    """Soft clouds of colour with a faint pattern and a few lines over them (H, W, 3)."""
    from PIL import Image

    cells = int(rng.integers(2, 10))
    coarse = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    clouds = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    mean = rng.uniform(60, 190, 3).astype(np.float32)
    contrast = np.float32(rng.uniform(0.2, 0.7))
    canvas = mean + contrast * (np.asarray(clouds, dtype=np.float32) - 128)
    canvas += rng.uniform(-25, 25) * _pattern(rng, side, side)[..., None]
    y, x = _grid(side, side)
    for _ in range(int(rng.integers(0, 4))):
        angle, offset = rng.uniform(0, np.pi), rng.uniform(-0.2, 0.8) * side
        line = abs(np.cos(angle) * x + np.sin(angle) * y - offset) < rng.uniform(0.5, 1.5)
        canvas[line] = rng.uniform(0, 255, 3)
    return np.asarray(canvas, dtype=np.float32)
