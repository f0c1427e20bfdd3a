"""The converter of the npm package: pixels in their places, labels checked, every form readable."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbyl import data
from lbyl.errors import LbylError

pillow = pytest.importorskip("PIL.Image")
SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_cifar10.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def package(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Five sheets of two images, as the package lays them out: one image a line."""
    images = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    for i, sheet in enumerate(np.split(images.reshape(10, 1024, 3), 5), 1):
        pillow.fromarray(sheet).save(tmp_path / f"data_batch_{i}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps(list(range(10))))
    return tmp_path, images


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"webp": None}, True),
        ({"webp": None, "lossless": True}, True),
        ({"webp": 92}, False),
    ],
)
def test_every_form_is_read_back(
    script: dict[str, Any], package: Any, options: dict[str, Any], exact: bool
) -> None:
    folder, images = package
    out = folder / "train.npz"
    script["convert"](folder, out, "train", **options)
    read = data.load(out, "train")
    assert read.labels is not None
    assert read.labels.tolist() == list(range(10))
    assert read.classes is not None
    assert read.classes[6] == "frog"
    (pixels, _), *_ = read.batches(10, (0.0,), (1.0,))
    given = images.transpose(0, 3, 1, 2) / 255
    assert pixels.shape == given.shape
    assert np.abs(pixels.numpy() - given).max() < (1e-6 if exact else 1.0)


def test_labels_that_do_not_fit_are_refused(script: dict[str, Any], package: Any) -> None:
    folder, _ = package
    (folder / "train_lables.json").write_text("[1, 2, 3]")
    with pytest.raises(LbylError, match="10 images but labels"):
        script["read_package"](folder, "train")
    (folder / "train_lables.json").write_text(json.dumps([11] * 10))
    with pytest.raises(LbylError, match="not 0 to 9"):
        script["read_package"](folder, "train")
