"""Batches by a network's example: split evenly, in its form, and lists of images for detectors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.inputs import batches
from lbyl.inputs.batches import FreshInputs, InputBatches, image_count, inverted, procedural
from lbyl.inputs.procedural import procedural_images
from support import small
from support.published import stir


def sizes(model: nn.Module, x: Tensor, count: int) -> list[int]:
    return [len(batch) for batch in procedural(model, x, count=count).batches]


def test_large_images_run_a_few_at_a_time_and_no_batch_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "BATCH_PIXELS", 20 * 64)
    model, x = nn.Identity(), torch.zeros(1, 3, 8, 8)
    assert sizes(model, x, 60) == [20, 20, 20]
    assert sizes(model, x, 45) == [20, 25]  # the last five join those before
    assert sizes(model, x, 35) == [20, 15]
    assert sizes(model, x, 5) == [5]


def collection(x: Any, count: int, model: nn.Module | None = None) -> InputBatches:
    return FreshInputs(model or nn.Identity(), x, count=count).collection()


def test_smaller_batches_hold_the_same_images() -> None:
    whole = collection(torch.zeros(1, 3, 8, 8), 40)
    small = whole.at_most(16)
    assert [len(batch) for batch in small.batches] == [16, 16, 8]
    assert (small.count, small.examples, whole.examples) == (3, 40, 40)
    assert torch.equal(torch.cat(list(small.batches)), torch.cat(list(whole.batches)))


def test_smaller_batches_of_images_that_are_drawn_later_are_drawn_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "DRAWN_PIXELS", 1)
    small = collection(torch.zeros(1, 3, 8, 8), 48).at_most(16)
    drawn = list(small.batches)
    assert [len(batch) for batch in drawn] == [16, 16, 16] and small.examples == 48
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))


class OnlyFours(nn.Module):
    """Takes four images and no other number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 3, 8, 8).mean((1, 2, 3))


def test_a_network_of_one_batch_size_gets_no_smaller_ones() -> None:
    whole = collection(torch.zeros(4, 3, 8, 8), 8, OnlyFours())
    assert [len(batch) for batch in whole.at_most(2).batches] == [4, 4]


def test_what_is_no_example_goes_with_every_batch() -> None:
    table = torch.arange(5.0)
    batch = {"image": torch.randn(12, 3, 6, 6), "table": table, "scale": torch.tensor(2.0)}
    given = InputBatches([batch], 1, True, "procedural", divisible=True)
    first, last = given.at_most(6).batches
    assert torch.equal(torch.cat([first["image"], last["image"]]), batch["image"])
    assert last["table"] is table and last["scale"].dim() == 0


def test_batches_together_are_the_images() -> None:
    x = torch.zeros(1, 3, 8, 8)
    made = torch.cat(list(procedural(nn.Identity(), x, count=40, seed=2).batches))
    assert torch.equal(made, procedural_images(40, (3, 8, 8), seed=2))


def test_the_number_of_images_falls_with_their_size() -> None:
    assert image_count((3, 8, 8)) == image_count((3, 32, 32)) == 1024
    assert image_count((3, 224, 224)) == 256 < image_count((3, 128, 128)) < 1024


class Several(nn.Module):
    """Takes an image, labels, a mask and a number."""

    def forward(self, image: Tensor, label: Tensor, flag: Tensor, scale: Tensor) -> Tensor:
        return image.mean((1, 2, 3)) * scale + label + flag


def test_other_inputs_follow_the_example() -> None:
    inputs = {
        "image": torch.zeros(2, 3, 6, 6, dtype=torch.float64),
        "label": torch.tensor([7, 3]),
        "flag": torch.tensor([1, 0]),
        "scale": torch.tensor(2.0),
    }
    (batch,) = procedural(Several(), inputs, count=30).batches
    assert batch["image"].shape == (30, 3, 6, 6) and batch["image"].dtype == torch.float64
    assert batch["label"].shape == (30,) and set(batch["label"].tolist()) <= set(range(8))
    assert batch["label"].unique().numel() > 3
    assert batch["flag"].tolist() == [1] * 30 and batch["scale"] is inputs["scale"]


def test_an_example_without_a_tensor_is_refused() -> None:
    with pytest.raises(lbyl.LbylError, match="hold no tensor"):
        procedural(nn.Identity(), {"x": 3}, count=4)


def test_collections_and_what_follows_are_drawn_apart() -> None:
    fresh = FreshInputs(nn.Identity(), torch.zeros(1, 3, 8, 8), seed=5)
    endless = fresh.endless()
    drawn = [
        next(iter(fresh.collection(64).batches)),
        next(iter(fresh.second_pass.batches)),
        next(endless),
        next(endless),
    ]
    firsts = [batch[0] for batch in drawn]
    assert not any(torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])
    assert fresh.second_pass is fresh.second_pass  # drawn once
    assert len(drawn[1]) == 1024 // batches.SECOND_PASS
    assert len(drawn[2]) == 1024 // batches.STEP
    assert torch.equal(firsts[0], procedural_images(64, (3, 8, 8), seed=5)[0])


@pytest.mark.usefixtures("whole_forecast")
@pytest.mark.parametrize(("asked", "wanted"), [(16, 16), (128, 64), (600, 150), (None, 256)])
def test_the_second_pass_is_never_larger_than_the_collection(
    asked: int | None, wanted: int
) -> None:
    fresh = FreshInputs(nn.Identity(), torch.zeros(1, 1, 4, 4), count=asked)
    assert sum(len(batch) for batch in fresh.second_pass.batches) == wanted


@pytest.mark.usefixtures("whole_forecast")
@pytest.mark.parametrize(
    ("side", "count", "together"), [(4, 256, 64), (128, 128, 16), (600, 32, 1)]
)
def test_the_forecast_runs_batches_whose_memory_a_processor_uses_again(
    side: int, count: int, together: int
) -> None:
    fresh = FreshInputs(nn.Identity(), torch.zeros(1, 1, side, side), count=count)
    sizes = [len(batch) for batch in fresh.forecasting()]
    assert max(sizes) == together and sum(sizes) == count // batches.FORECAST


def test_steps_on_a_pool_see_fresh_inputs_in_turn_and_its_first_batch_never_again() -> None:
    fresh = FreshInputs(nn.Identity(), torch.zeros(1, 3, 8, 8), seed=5)
    pool = fresh.collection(400)
    (images,) = pool.batches
    seen = list(itertools.islice(fresh.endless_with(pool), 13))
    assert torch.equal(seen[0], images[: len(seen[0])])
    rows = {tuple(row) for row in images[len(seen[0]) :].flatten(1).tolist()}
    for step, batch in enumerate(seen[1:]):
        of_pool = [tuple(row) in rows for row in batch.flatten(1).tolist()]
        assert all(of_pool) if step % 2 == 0 else not any(of_pool)
    assert all(torch.equal(a, b) for a, b in zip(seen[2::2], fresh.endless()))


# ---------------------------------------------------------------------------------- detectors


@pytest.fixture(scope="module")
def detector() -> nn.Module:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    return stir(small.ssdlite()[0])


IMAGES = ([torch.rand(3, 64, 64), torch.rand(3, 64, 64)],)


def test_detectors_get_lists_of_images_between_0_and_1(detector: nn.Module) -> None:
    found = procedural(detector, IMAGES, count=10)
    drawn = list(found.batches)
    assert found.count == len(drawn) == 3
    assert [len(images) for (images,) in drawn] == [4, 4, 2]
    for (images,) in drawn:
        assert isinstance(images, list)
        for image in images:
            assert image.shape == (3, 64, 64) and float(image.std()) > 0.05
            assert 0 <= float(image.min()) < float(image.max()) <= 1
    default = procedural(detector, IMAGES)
    assert sum(len(images) for (images,) in default.batches) == batches.LISTED


def test_what_comes_beside_the_list_comes_along() -> None:
    marker = object()
    (batch,) = procedural(nn.Identity(), ([torch.rand(3, 8, 8)], marker), count=4).batches
    assert len(batch[0]) == 4 and batch[1] is marker


def test_detectors_are_restored(detector: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LISTED", 8)
    result = lbyl.compress(detector, IMAGES, 0.3, data=8)
    assert len(result.graph) > 5
    assert result.data == "procedural" and result.corrections.recalibrated > 5
    assert all(row.error is not None and row.error < 1 for row in result.rows)
    with torch.no_grad():
        boxes = result.model.eval()(*IMAGES)
    assert len(boxes) == 2 and all({"boxes", "scores", "labels"} <= b.keys() for b in boxes)


def test_detectors_have_no_inverted_images(detector: nn.Module) -> None:
    drawn = procedural(detector, IMAGES, count=4)
    with pytest.raises(lbyl.LbylError, match="one image tensor"):
        inverted(detector, drawn)


def test_large_images_are_drawn_when_they_are_needed_and_are_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(),
        torch.zeros(1, 3, 16, 16),
    )
    monkeypatch.setattr(batches, "DRAWN_PIXELS", 39 * 256)
    monkeypatch.setattr(batches, "BATCH_PIXELS", 16 * 256)
    drawn: list[int] = []
    painted = batches.procedural_images

    def counted(count: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn.append(count)
        return painted(count, *args, **kwargs)

    fresh = FreshInputs(model, x)
    fresh.gains  # noqa: B018 (fitted before anything is counted)
    monkeypatch.setattr(batches, "procedural_images", counted)
    inputs = fresh.collection(40)
    assert isinstance(inputs.batches, batches.DrawnLater) and not drawn
    sizes = [len(batch) for batch in inputs.batches]
    assert sizes == [16, 16, 8] == drawn and inputs.count == 3
    first, again = (torch.cat(list(inputs.batches)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[:16], first[16:32])
    assert len(list(inputs.batches[:2])) == 2
    assert isinstance(fresh.collection(39).batches, list)  # few enough to be held
