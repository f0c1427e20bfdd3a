"""Detectors agree by their boxes, whatever form these come in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.restoring.boxes import Boxes, agreement, find_boxes, least_score
from lbyl.restoring.forecast import Forecaster

SIDE = 32
IMAGES = torch.zeros(2, 3, SIDE, SIDE)

pytestmark = pytest.mark.usefixtures("whole_forecast")


def boxes(*rows: tuple[float, ...]) -> Boxes:
    """Rows of left, top, right, bottom, class, score."""
    values = torch.tensor(rows).reshape(-1, 6)
    return Boxes(values[:, :4], values[:, 4].long(), values[:, 5])


FIRST = ((2, 2, 12, 12, 0, 0.9), (15, 15, 30, 30, 2, 0.8))


def test_equal_boxes_agree_and_other_classes_or_places_do_not() -> None:
    ours = [boxes(*FIRST)]
    assert agreement(ours, ours) == (1, 2)
    shifted = [boxes((3, 2, 13, 12, 0, 0.7), FIRST[1])]  # overlaps by 90 / 110
    assert agreement(ours, shifted) == (1, 2)
    far = [boxes((6, 2, 16, 12, 0, 0.9), FIRST[1])]  # 60 / 140
    assert agreement(ours, far) == (0.5, 2)
    renamed = [boxes((2, 2, 12, 12, 1, 0.9), FIRST[1])]
    assert agreement(ours, renamed) == (0.5, 2)


def test_a_box_too_many_counts_as_much_as_one_too_few() -> None:
    one, two = [boxes(FIRST[0])], [boxes(*FIRST)]
    assert agreement(one, two)[0] == agreement(two, one)[0] == pytest.approx(2 / 3)
    assert agreement([boxes()], [boxes()]) == (None, 0)
    assert agreement([boxes()], one) == (0, 0)


def test_one_box_is_the_pair_of_one_box_only() -> None:
    twice = [boxes(FIRST[0], (2, 2, 12, 13, 0, 0.6))]  # too near: doubles of one network
    assert agreement(twice, [boxes(FIRST[0])]) == (1, 1)
    beside = [boxes(FIRST[0], (5, 2, 15, 12, 0, 0.6))]  # 70 / 130 of the first
    assert agreement(beside, [boxes(FIRST[0])])[0] == pytest.approx(2 / 3)


def test_a_detector_that_is_sure_of_nothing_is_asked_for_a_guess_an_image() -> None:
    unsure = [boxes((2, 2, 12, 12, 0, 0.04), (15, 15, 30, 30, 2, 0.01)), boxes()]
    assert least_score(unsure) == pytest.approx(0.01)
    assert least_score([boxes(*FIRST)] * 3) == 0.25
    assert agreement(unsure, unsure) == (1, 2)


def in_places(images: list[Boxes], classes: int = 3, others: int = 0) -> Tensor:
    """(n, 4 + classes + others, places) with places that nobody is sure of beside."""
    made = torch.zeros(len(images), 4 + classes + others, 20)
    made[:, :4] = torch.tensor([8.0, 8, 4, 4])[None, :, None]
    made[:, 4 + classes :] = torch.randn(len(images), others, 20)
    for row, x in zip(made, images):
        for i in range(len(x.scores)):
            left, top, right, bottom = x.corners[i].tolist()
            sides = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
            row[:4, 7 * i] = torch.tensor(sides)
            row[4 + int(x.labels[i]), 7 * i] = x.scores[i]
    return made


def in_rows(images: list[Boxes]) -> Tensor:
    rows = [torch.cat([x.corners, x.scores[:, None], x.labels[:, None]], 1) for x in images]
    return torch.stack(rows)


def named(images: list[Boxes]) -> list[dict[str, Tensor]]:
    return [{"boxes": x.corners, "labels": x.labels, "scores": x.scores} for x in images]


@pytest.mark.parametrize(
    "output",
    [
        lambda x: named(x),
        lambda x: (in_places(x), {"feats": [torch.zeros(2, 5)]}),
        lambda x: in_places(x, others=8),
        lambda x: in_rows(x),
    ],
    ids=["named", "places", "places with masks", "rows"],
)
def test_boxes_are_found_in_every_form(output: Any) -> None:
    given = [boxes(*FIRST), boxes((1, 1, 9, 20, 1, 0.7), (3, 3, 20, 9, 0, 0.5))]
    found = find_boxes(output(given), IMAGES)
    assert found is not None and len(found) == 2
    for ours, theirs in zip(given, found):
        theirs = theirs.from_score(0.3)
        torch.testing.assert_close(theirs.corners, ours.corners)
        assert theirs.labels.tolist() == ours.labels.tolist()


@pytest.mark.parametrize(
    "output",
    [
        torch.randn(2, 10),  # scores of a classifier
        torch.rand(2, 12, 40),  # chances: no side is longer than a pixel
        torch.randn(2, 12, 40) * 3,  # features, or scores of tokens
        torch.randn(2, 12, 6),
        torch.rand(2, 12, 6) * 10,
        torch.randn(2, 5, 8, 8),  # classes of pixels
        torch.full((2, 12, 40), math.nan),
        [],
        [{"boxes": torch.zeros(1, 4)}],
    ],
)
def test_other_outputs_are_not_taken_for_boxes(output: Any) -> None:
    torch.manual_seed(0)
    assert find_boxes(output, IMAGES) is None
    assert find_boxes(torch.rand(2, 12, 40) * 10, torch.zeros(2, 12, dtype=torch.long)) is None


class Detector(nn.Module):
    """A box around where each of a few filters answers most."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.second = nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        maps = self.second(self.first(images).relu()).flatten(2)
        scores, places = maps.sigmoid().max(2)
        x, y = places % SIDE, places // SIDE
        corners = torch.stack([x - 4, y - 4, x + 4, y + 4], 2).float()
        labels = torch.arange(3)
        return [{"boxes": b, "labels": labels, "scores": s} for b, s in zip(corners, scores)]


def test_the_forecast_of_a_detector_is_of_its_boxes() -> None:
    model = Detector()
    prepared = lbyl.prepare(model, torch.zeros(1, 3, SIDE, SIDE), data=32)
    none, much = (prepared.compress({"*": r}, criterion="l2") for r in (0.0, 0.75))
    assert none.forecast is not None and much.forecast is not None
    assert none.forecast.agreement == 1 and none.forecast.kept is None
    assert much.forecast.agreement is not None and much.forecast.agreement < 0.9
    assert much.forecast.boxes is not None and much.forecast.boxes >= much.forecast.inputs
    assert "of boxes agree in class and place" in str(much).splitlines()[0]
    batch = torch.rand(4, 3, SIDE, SIDE)
    told = Forecaster(model, [batch, batch], "own")(model)
    assert (told.agreement, told.boxes, told.inputs) == (1, 24, 8)
