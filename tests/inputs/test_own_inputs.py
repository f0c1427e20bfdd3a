"""A user's own inputs, parted by what they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.inputs.batches import InputBatches
from lbyl.inputs.examples import joined, regrouped, rows_in
from lbyl.inputs.loader import FEWEST_HELD, MOST_HELD, OwnInputs, own_batches
from lbyl.models import resolve


def numbered(*sizes: int) -> InputBatches:
    """Batches of so many examples, each of which is its number."""
    rows = torch.arange(sum(sizes), dtype=torch.float32)[:, None]
    return InputBatches(list(rows.split(list(sizes))), len(sizes), False, "own")


def numbers_of(inputs: InputBatches | None) -> list[int]:
    assert inputs is not None
    return torch.cat(list(inputs.batches)).flatten().int().tolist()


@pytest.mark.parametrize("sizes", [(200,), (64, 64, 64, 8), (1,) * 200, (3,) * 67])
def test_every_fourth_is_held_out_and_no_other(sizes: tuple[int, ...]) -> None:
    parts = OwnInputs.of(numbered(*sizes))
    fitted, held = numbers_of(parts.fitted), numbers_of(parts.held)
    assert sorted(fitted + held) == list(range(sum(sizes)))
    assert len(held) == sum(sizes) // 4
    assert parts.held is not None and all(rows_in(b) for b in parts.held.batches)


def test_what_comes_in_order_is_in_both_parts() -> None:
    parts = OwnInputs.of(numbered(*[50] * 20))
    held = torch.tensor(numbers_of(parts.held)) // 100
    assert held.bincount().min() >= 24 and len(held) == 250


def test_few_are_all_fitted_on() -> None:
    few = numbered(4 * FEWEST_HELD - 1)
    assert OwnInputs.of(few) == OwnInputs(few, None)
    assert len(numbers_of(OwnInputs.of(numbered(4 * FEWEST_HELD)).held)) == FEWEST_HELD


def test_no_more_are_held_out_than_tell_something_and_nothing_is_copied() -> None:
    inputs = numbered(*[256] * 40)
    parts = OwnInputs.of(inputs)
    assert MOST_HELD // 2 < len(numbers_of(parts.held)) <= MOST_HELD
    first, given = next(iter(parts.fitted.batches)), next(iter(inputs.batches))
    assert first.data_ptr() == given.data_ptr()


def test_batches_of_one_size_stay_whole() -> None:
    parts = OwnInputs.of(numbered(*[16] * 12), whole=True)
    assert parts.held is not None
    assert [rows_in(b) for b in parts.held.batches] == [16] * 3
    assert [rows_in(b) for b in parts.fitted.batches] == [16] * 9
    assert not set(numbers_of(parts.held)) & set(numbers_of(parts.fitted))
    few = numbered(*[64] * 3)  # of three batches none can be spared
    assert OwnInputs.of(few, whole=True).held is None


def test_mappings_are_parted_by_row_and_what_is_no_row_goes_with_both() -> None:
    table = torch.arange(5)
    batch = {"ids": torch.arange(256).view(128, 2), "mask": torch.ones(128, 2), "table": table}
    parts = OwnInputs.of(InputBatches([batch], 1, False, "own"))
    assert parts.held is not None
    (fitted,), (held,) = parts.fitted.batches, parts.held.batches
    assert [len(x["ids"]) for x in (fitted, held)] == [96, 32]
    assert [len(x["mask"]) for x in (fitted, held)] == [96, 32]
    assert fitted["table"] is table and held["table"] is table


def test_batchnorm_normalises_by_batches_that_are_large_enough() -> None:
    small = OwnInputs.of(numbered(*[2] * 40)).normalising(64)
    assert small is not None and small.batch_statistics
    assert [rows_in(batch) for batch in small.batches] == [64]
    large = OwnInputs.of(numbered(4000)).normalising(64)
    assert large is not None and numbers_of(large) == list(range(64))
    assert OwnInputs.of(numbered(20)).normalising(64) is None
    assert OwnInputs.of(numbered(*[4] * 40), whole=True).normalising(64, whole=True) is None


def test_neighbours_of_one_form_are_joined() -> None:
    images = [torch.zeros(4, 3, s, s) for s in (8, 8, 8, 16, 8)]
    made = regrouped(images, 8)
    assert [tuple(x.shape) for x in made] == [
        (8, 3, 8, 8),
        (4, 3, 8, 8),
        (4, 3, 16, 16),
        (4, 3, 8, 8),
    ]
    flag = torch.tensor([1.0, 2.0, 3.0])
    pairs = [{"x": torch.zeros(2, 4), "flag": flag} for _ in range(3)]
    together = joined(pairs)
    assert together["x"].shape == (6, 4) and torch.equal(together["flag"], flag)


class TakesOnlyProbabilities(nn.Module):
    """Runs on nothing that can be drawn for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.min()) < 0:
            raise ValueError("no probabilities")
        return self.last(self.norm(self.first(x)).relu())


@pytest.mark.parametrize(("count", "told_on"), [(20, 20), (200, 50)])
def test_a_network_that_takes_nothing_drawn_is_compressed_on_own_inputs_alone(
    count: int, told_on: int
) -> None:
    torch.manual_seed(0)
    model, own = TakesOnlyProbabilities().eval(), torch.rand(count, 6)
    result = lbyl.compress(model, own[:2], lbyl.Budget(macs=0.7), data=own)
    assert result.data == "own" and result.forecast is not None
    assert (result.forecast.source, result.forecast.inputs) == ("own", told_on)
    assert (result.corrections.recalibrated > 0) == (count >= FEWEST_HELD)


@pytest.mark.parametrize("count", [2, 8])
def test_few_own_images_do_not_ruin_what_none_would_give(count: int) -> None:
    """With fewer images than channels every width looks free on the images themselves."""
    network = resolve("lbyl:digits", "shipped")
    images, labels = next(network_images(network))
    own, test, truth = images[:count], images[100:], labels[100:]

    def accuracy(data: Tensor | None) -> float:
        budget = lbyl.Budget(macs=0.25)
        slim = lbyl.compress(network.model, network.example, budget, data=data).model
        with torch.no_grad():
            return float((slim(test).argmax(1) == truth).double().mean())

    assert accuracy(own) > accuracy(None) - 0.03


def network_images(network: lbyl.models.Network):  # type: ignore[no-untyped-def]
    from lbyl import data

    images = data.load("digits", "test")
    return images.batches(1000, network.mean, network.std, torch.device("cpu"), None)


def test_own_inputs_are_gone_through_once_however_they_come() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(130, 4)
    drawn = iter(x.split(10))
    result = lbyl.compress(model, x[:2], 0.5, data=drawn)
    assert next(drawn, None) is None
    same = lbyl.compress(model, x[:2], 0.5, data=list(x.split(10)))
    assert torch.equal(result.model(x), same.model(x))
    assert own_batches(model, x).count == 1
