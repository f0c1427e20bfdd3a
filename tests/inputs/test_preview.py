"""Previews: one picture of many images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lbyl.errors import LbylError
from lbyl.inputs.preview import contact_sheet, preview


def test_preview_writes_one_picture(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    path = preview(tmp_path / "new" / "sheet.png", count=6, shape=(3, 16, 24))
    assert list(path.parent.iterdir()) == [path]
    with Image.open(path) as picture:
        assert picture.size == (3 * 26 - 2, 2 * 18 - 2)


def test_preview_of_given_images_and_grey() -> None:
    sheet = contact_sheet(torch.randn(3, 1, 5, 7))
    assert sheet.shape == (12, 16, 3) and sheet.dtype == torch.uint8
    assert torch.equal(sheet[..., 0], sheet[..., 2])
    assert (sheet[7:, 9:] == 255).all()  # the fourth cell is empty


def test_preview_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with pytest.raises(LbylError):
        preview(tmp_path / "sheet.png", images=torch.randn(4, 3, 10))
    with pytest.raises(LbylError):
        preview(tmp_path / "sheet.nothing")
    assert list(tmp_path.iterdir()) == []
