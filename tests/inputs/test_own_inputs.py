"""Own inputs, parted by what they are for, and inputs of other forms than one image tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app import data
from lbyl.app.sources import resolve
from support import small
from support.published import stir
from support.seen import collected, watched


class TakesOnlyProbabilities(nn.Module):
    """Runs on nothing that can be drawn for it, and in batches of one size if that is given."""

    def __init__(self, width: int = 6, size: int | None = None, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.size = nn.Linear(width, width), nn.Linear(width, 3), size
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        if not norm:  # what the last layer reads is what is given
            self.first.weight.data.copy_(torch.eye(width))
            self.first.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.min()) < 0 or (self.size and len(x) not in (self.size, 2)):
            raise ValueError("no probabilities")
        return self.last(self.norm(self.first(x)).relu())


def fitted(sizes: list[int], size: int | None = None) -> list[int]:
    """Which of so many inputs statistics are collected on, each of which has a feature its own."""
    count = sum(sizes)
    own = list(torch.eye(count).split(sizes))
    model = TakesOnlyProbabilities(count, size).eval()
    found = lbyl.prepare(model, own[0][: size or 2], data=own).statistics()
    mean = found.moments["last"].mean.flatten()
    rows = torch.nonzero(mean).flatten()
    torch.testing.assert_close(mean[rows], torch.full((len(rows),), 1 / len(rows)).double())
    return rows.tolist()


@pytest.mark.parametrize("sizes", [[200], [64, 64, 64, 8], [1] * 200, [3] * 67])
def test_every_fourth_is_held_out_and_what_comes_in_order_is_in_both_parts(
    sizes: list[int],
) -> None:
    rows, count = fitted(sizes), sum(sizes)
    held = set(range(count)) - set(rows)
    assert len(held) == count // 4
    if len(sizes) > 1:
        assert all(15 <= len(held & set(range(at, at + 64))) <= 17 for at in (0, 64, 128))


@pytest.mark.parametrize(
    ("sizes", "size", "held"),
    [([127], None, []), ([128], None, range(96, 128)), ([64] * 3, 64, []),
     ([16] * 12, 16, [*range(48, 64), *range(112, 128), *range(176, 192)])],
)  # fmt: skip
def test_few_are_all_fitted_on_and_batches_of_one_size_stay_whole(
    sizes: list[int], size: int | None, held: Any
) -> None:
    assert fitted(sizes, size) == [n for n in range(sum(sizes)) if n not in held]


@pytest.mark.parametrize(("count", "told_on"), [(20, 20), (200, 50), (6000, 500)])
def test_a_network_that_takes_nothing_drawn_is_compressed_on_own_inputs_alone(
    count: int, told_on: int
) -> None:
    model, own = TakesOnlyProbabilities(norm=True).eval(), torch.rand(count, 6)
    result = lbyl.compress(model, own[:2], lbyl.Budget(macs=0.7), data=own)
    assert result.data == "own" and result.forecast is not None
    assert result.forecast.source == "own" and told_on <= result.forecast.inputs <= 1.03 * told_on
    assert (result.corrections.recalibrated > 0) == (count >= 32)


@pytest.mark.parametrize("count", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_few_own_images_do_not_ruin_what_none_would_give(count: int) -> None:
    """With fewer images than channels every width looks free on the images themselves."""
    network = resolve("lbyl:digits", "shipped")
    held = data.load("digits", "test")
    batches = held.batches(1000, network.mean, network.std, torch.device("cpu"), None)
    images, labels = next(iter(batches))

    def accuracy(own: Tensor | None) -> float:
        budget = lbyl.Budget(macs=0.25)
        slim = lbyl.compress(network.model, network.example, budget, data=own).model
        with torch.no_grad():
            return float((slim(images[100:]).argmax(1) == labels[100:]).double().mean())

    assert accuracy(images[:count]) > accuracy(None) - 0.03


def test_own_inputs_are_gone_through_once_however_they_come() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(130, 4)
    drawn = iter(x.split(10))
    result = lbyl.compress(model, x[:2], 0.5, data=drawn)
    assert next(drawn, None) is None
    same = lbyl.compress(model, x[:2], 0.5, data=list(x.split(10)))
    assert torch.equal(result.model(x), same.model(x))
    labelled = [(part, torch.zeros(10)) for part in x.split(10)]
    assert torch.equal(lbyl.compress(model, x[:2], 0.5, data=labelled).model(x), same.model(x))


# ------------------------------------------------------------------- other forms, drawn for them


class Several(nn.Module):
    """Takes an image, labels, a mask and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor, label: Tensor, flag: Tensor, scale: Tensor) -> Tensor:
        return self.b(self.a(image).relu()).mean((1, 2, 3)) * scale + label + flag


def test_other_inputs_follow_the_example() -> None:
    image, scale = torch.zeros(2, 3, 6, 6, dtype=torch.float64), torch.tensor(2.0)
    x = {"image": image, "label": torch.tensor([7, 3]), "flag": torch.tensor([1, 0])}
    (batch,) = collected(Several().double().eval(), {**x, "scale": scale}, 30)
    assert batch["image"].shape == (30, 3, 6, 6) and batch["image"].dtype == torch.float64
    assert set(batch["label"].tolist()) <= set(range(8)) and batch["label"].unique().numel() > 3
    assert batch["flag"].tolist() == [1] * 30 and torch.equal(batch["scale"], scale)


class OnlyFours(nn.Module):
    """Takes four images and no other number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu()).reshape(4, 2, 6, 6).mean((2, 3))


def test_a_network_of_one_batch_size_gets_no_other() -> None:
    model, x = OnlyFours().eval(), torch.zeros(4, 3, 8, 8)
    assert [len(batch) for batch in collected(model, x, 8)] == [4, 4]
    result = lbyl.compress(model, x, lbyl.Budget(macs=0.7), data=14, refine=3)
    assert result.forecast is not None and result.refinement is not None


def test_collecting_judging_and_refining_see_other_images_each() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1))
    x, numbers = torch.zeros(1, 3, 8, 8), []
    for steps in (0, 3, 3):
        with watched(model.eval()) as seen:
            lbyl.compress(model, x, lbyl.Budget(macs=0.7), data=64, refine=steps)
        numbers.append({tuple(image.flatten().tolist()) for batch in seen for image in batch})
    assert numbers[1] == numbers[2] and len(numbers[0]) > 64 + 16
    assert len(numbers[1]) >= len(numbers[0]) + 3 * 64


@pytest.fixture(scope="module")
def detector() -> nn.Module:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    return stir(small.ssdlite()[0])


IMAGES = ([torch.rand(3, 64, 64), torch.rand(3, 64, 64)],)


def test_detectors_are_restored_on_lists_of_images_between_0_and_1(detector: nn.Module) -> None:
    with watched(detector) as seen:
        result = lbyl.compress(detector, IMAGES, 0.3, data=10)
    lists = [given for given in seen if isinstance(given, list) and len(given) > 2]
    assert len(lists) > 1
    for image in (image for given in lists for image in given):
        assert image.shape == (3, 64, 64) and float(image.std()) > 0.05
        assert 0 <= float(image.min()) < float(image.max()) <= 1
    assert len(result.graph) > 5 and result.data == "procedural"
    assert result.corrections.recalibrated > 5
    assert all(row.error is not None and row.error < 1 for row in result.rows)
    with torch.no_grad():
        boxes = result.model.eval()(*IMAGES)
    assert len(boxes) == 2 and all({"boxes", "scores", "labels"} <= b.keys() for b in boxes)
    with pytest.raises(lbyl.LbylError, match="one image tensor"):
        lbyl.prepare(detector, IMAGES, data="inversion").statistics()
