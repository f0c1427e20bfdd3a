"""Which channels stay when every layer needs at least one of them."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl.surgery.indices import complete, pruned_of
from support.networks import Beside


@pytest.fixture(scope="module")
def graph() -> lbyl.Graph:
    return lbyl.trace(Beside(), torch.zeros(2, 6), residual=True)


def test_what_leaves_no_layer_empty_stays_as_it_is(graph: lbyl.Graph) -> None:
    (unit,) = graph.units
    kept = torch.tensor([1, 5, 9])
    assert complete(graph, unit, kept).tolist() == [1, 5, 9]


def test_the_most_worthy_comes_in_for_the_least_worthy(graph: lbyl.Graph) -> None:
    """Nothing of `left` was kept: its channel 2 comes in, and 7 goes; as many stay."""
    (unit,) = graph.units
    worth = torch.tensor([1.0, 2, 9, 3, 5, 5, 8, 1, 7, 6, 4, 4])
    kept = torch.tensor([6, 7, 8, 9])
    assert complete(graph, unit, kept, worth).tolist() == [2, 6, 8, 9]


def test_where_every_kept_one_is_needed_there_is_one_more(graph: lbyl.Graph) -> None:
    (unit,) = graph.units
    assert complete(graph, unit, torch.tensor([5]), torch.arange(12.0)).tolist() == [3, 5]
    two = complete(graph, unit, torch.tensor([0, 5]), torch.arange(12.0), least=2)
    assert two.tolist() == [0, 3, 5, 11]


def test_what_is_pruned_is_what_is_not_kept() -> None:
    assert pruned_of(5, torch.tensor([1, 4])).tolist() == [0, 2, 3]
