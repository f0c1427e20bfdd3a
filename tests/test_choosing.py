"""What is chosen where a call leaves it open, and that the result says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lbyl
from lbyl.app.sources import resolve
from support.networks import build, example

pytestmark = pytest.mark.usefixtures("few_images")


def prepared(name: str = "bottleneck", **options: Any) -> lbyl.Prepared:
    return lbyl.prepare(build(name), example(name), **options)


def test_without_a_criterion_echo_tries_two_and_keeps_the_preferred() -> None:
    network = prepared()
    result = network.compress({"*": 0.5})
    assert result.allocation is not None
    tried = result.allocation.tried
    assert set(tried) == {"criterion l2", "criterion echo"}
    scores = [tried["criterion l2"], tried["criterion echo"]]
    # The second, which restores as it chooses, unless the first diverges clearly less.
    assert result.chosen_by == ("l2" if scores[0] < 0.9 * scores[1] else "echo")
    named = network.compress({"*": 0.5}, criterion=result.chosen_by)
    for a, b in zip(result.model.parameters(), named.model.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["lbyl", "none", "neuron-merging", "moments"])
def test_other_methods_go_by_l2_and_nothing_is_tried(method: str) -> None:
    result = prepared().compress(0.5, method=method)
    assert result.chosen_by == "l2" and result.allocation is None


def test_patterns_are_taken_literally() -> None:
    network = prepared()
    result = network.compress({"*": 0.5}, criterion="l2")
    assert result.allocation is None
    assert all(row.kept == row.channels // 2 for row in result.rows)


@pytest.mark.parametrize("budget", [{"macs": 0.6}, {"params": 0.6}])
def test_a_budget_is_met_and_never_diverges_more_than_one_ratio(budget: dict[str, float]) -> None:
    result = prepared().compress(lbyl.Budget(**budget), criterion="l2")
    allocation = result.allocation
    assert allocation is not None
    assert allocation.tried[allocation.name] <= allocation.tried["uniform"]
    before, after = (
        getattr(size, "macs" if "macs" in budget else "parameters")
        for size in (result.before, result.after)
    )
    assert after <= 0.6 * before
    assert allocation.name in result.story


def test_own_inputs_are_what_networks_are_compared_on() -> None:
    own = torch.randn(160, *example("bottleneck").shape[1:])
    result = prepared(data=[own[:12], own[12:]]).compress({"*": 0.5})
    assert result.data == "own and procedural"
    told = result.forecast
    assert told is not None and (told.source, told.inputs) == ("own", 40)


def test_what_a_budget_gives_is_what_its_plan_gives() -> None:
    """Solutions that several candidates share are not changed by the networks made of them."""
    network = resolve("lbyl:digits", "shipped")
    digits = lbyl.prepare(network.model, network.example, data=64)
    chosen = digits.compress(lbyl.Budget(macs=0.6))
    again = digits.compress(chosen.plan)
    for name, value in chosen.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_candidates_are_tried_on_copies_and_judged_alike_each_time() -> None:
    network = prepared("chain")
    before = {name: value.clone() for name, value in network.model.state_dict().items()}
    result = network.compress(lbyl.Budget(macs=0.6))
    allocation = result.allocation
    assert allocation is not None and len(allocation.tried) > 2
    assert all(0 <= score < math.inf for score in allocation.tried.values())
    again = network.compress(lbyl.Budget(macs=0.6)).allocation
    assert again is not None and again.tried == allocation.tried
    after = network.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
