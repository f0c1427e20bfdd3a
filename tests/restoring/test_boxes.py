"""Detectors agree by their boxes, whatever form these come in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl

Row = tuple[float, ...]
FIRST, SECOND = (2, 2, 12, 12, 0, 0.9), (15, 15, 30, 30, 2, 0.8)


def named(rows: Tensor) -> Any:
    return [{"boxes": x[:, :4], "labels": x[:, 4].long(), "scores": x[:, 5]} for x in rows]


def in_places(rows: Tensor, masks: int = 0) -> Tensor:
    """(n, 4 + classes + others, places): centres, sides and a score for each of three classes."""
    n, count, _ = rows.shape
    made = torch.zeros(n, 7 + masks, count + 3)
    made[:, :4] = torch.tensor([8.0, 8, 4, 4])[None, :, None]
    made[:, 7:] = torch.randn(n, masks, count + 3)
    low, high = rows[..., :2], rows[..., 2:4]
    made[:, :4, :count] = torch.cat([(low + high) / 2, high - low], 2).transpose(1, 2)
    made[:, 4:7, :count] = nn.functional.one_hot(rows[..., 4].long(), 3).mT * rows[:, None, :, 5]
    return made


FORMS: dict[str, Any] = {
    "named": named,
    "places": lambda rows: (in_places(rows), {"features": [torch.zeros(2, 5)]}),
    "places with masks": lambda rows: in_places(rows, 8),
    "rows": lambda rows: torch.cat([rows[..., :4], rows[..., 5:], rows[..., 4:5]], 2),
}


class Answering(nn.Module):
    """Gives the same boxes for every image."""

    def __init__(self, rows: list[Row], form: Any = named) -> None:
        super().__init__()
        self.layer, self.form = nn.Conv2d(3, 2, 1), form
        self.rows = torch.tensor(rows).reshape(-1, 6)

    def forward(self, images: Tensor) -> Any:
        silent = 0 * self.layer(images).sum()
        return self.form(self.rows.expand(len(images), -1, -1) + silent)


def told(ours: list[Row], theirs: list[Row], form: Any = named) -> Any:
    prepared = lbyl.prepare(Answering(ours, form), torch.zeros(2, 3, 32, 32))
    return prepared.forecast(Answering(theirs, form))


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [
        ([FIRST, SECOND], [FIRST, SECOND], 1),
        ([FIRST, SECOND], [(3, 2, 13, 12, 0, 0.7), SECOND], 1),  # overlaps by 90 / 110
        ([FIRST, SECOND], [(6, 2, 16, 12, 0, 0.9), SECOND], 0.5),  # 60 / 140
        ([FIRST, SECOND], [(2, 2, 12, 12, 1, 0.9), SECOND], 0.5),  # of another class
        ([FIRST], [FIRST, SECOND], 2 / 3),  # one too many counts as one too few
        ([FIRST, SECOND], [FIRST], 2 / 3),
        ([FIRST, (2, 2, 12, 13, 0, 0.6)], [FIRST], 1),  # doubles of one network
        ([FIRST, (5, 2, 15, 12, 0, 0.6)], [FIRST], 2 / 3),  # 70 / 130: two boxes, one pair
        ([FIRST, (*SECOND[:5], 0.2)], [FIRST], 1),  # not sure enough to count
        ([(*FIRST[:5], 0.04)], [(*FIRST[:5], 0.05)], 1),  # unless nothing is surer
    ],
)
def test_boxes_agree_in_class_and_place(ours: list[Row], theirs: list[Row], agree: float) -> None:
    found = told(ours, theirs)
    assert found.agreement == pytest.approx(agree) and found.kept is None
    distinct = {1 if r[5] < 0.25 or r[3] == 13 else i for i, r in enumerate(ours, 2)} - {1} or {1}
    assert found.boxes == len(distinct) * found.inputs
    assert "boxes agree in class and place" in str(found)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_boxes_are_found_in_every_form(form: Any) -> None:
    found = told([FIRST, SECOND], [(6, 2, 16, 12, 0, 0.9), SECOND], form)
    assert found.agreement == 0.5 and found.boxes == 2 * found.inputs


def test_networks_that_find_nothing_agree_in_nothing() -> None:
    assert told([], []).agreement is None and told([], []).boxes == 0


@pytest.mark.parametrize(
    "output",
    [
        torch.randn(10),  # scores of a classifier
        torch.rand(12, 40),  # chances: no side is longer than a pixel
        torch.randn(12, 40) * 3,  # features, or scores of tokens
        torch.randn(12, 6),
        torch.rand(12, 6) * 10,
        torch.randn(5, 8, 8),  # classes of pixels
    ],
)
def test_other_outputs_are_not_taken_for_boxes(output: Tensor) -> None:
    found = told(
        [FIRST], [FIRST], lambda rows: output.expand(len(rows), *output.shape) + rows.sum()
    )
    assert found.boxes is None
