"""Plans are pure data: to JSON and back, and checked before anything is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import lbyl
from support.networks import Beside, build, example, fingerprint

Plan = lbyl.Plan


def plan(method: str = "lbyl") -> Plan:
    return lbyl.prepare(build("chain"), example("chain")).plan(0.5, method=method)


def test_json_and_back() -> None:
    first = plan()
    again = Plan.from_dict(json.loads(json.dumps(first.to_dict())))
    assert again.to_dict() == first.to_dict()
    assert all(torch.equal(again.kept[n], k) for n, k in first.kept.items())
    assert lbyl.criteria.resolve(dict(again.criterion)) == lbyl.criteria.L2()
    assert again.chosen_by == "l2" and not again.method


def test_a_method_that_chooses_is_named_and_comes_back() -> None:
    first = plan("coreset")
    again = Plan.from_dict(json.loads(json.dumps(first.to_dict())))
    assert lbyl.methods.resolve(dict(again.method)) == lbyl.methods.Coreset()
    assert again.chosen_by == "coreset" and not again.criterion
    assert Plan({}, {}).chosen_by is None


def test_a_plan_applied_again_gives_the_same_network() -> None:
    model, x = build("chain"), example("chain")
    first = lbyl.compress(model, x, 0.5, criterion="l1", data=32)
    again = lbyl.compress(model, x, first.plan, data=32)
    assert torch.equal(first.model(x), again.model(x))


WRONG: dict[str, tuple[Any, str]] = {
    "version": ({"version": 1, "units": {}}, "version 1"),
    "no version": ({"units": {}}, "version None"),
    "a list": ([1, 2], "version 'list'"),
    "no units": ({"version": 2}, "'units'"),
    "units a list": ({"version": 2, "units": []}, "'units'"),
    "no kept": ({"version": 2, "units": {"a": {"channels": 3}}}, "'a' needs"),
    "entry a list": ({"version": 2, "units": {"a": [0]}}, "'a' needs"),
    "text": ({"version": 2, "units": {"a": {"channels": 3, "kept": "01"}}}, "'a'.*ascending"),
    "floats": ({"version": 2, "units": {"a": {"channels": 3, "kept": [0.0]}}}, "'a'.*ascending"),
    "bools": ({"version": 2, "units": {"a": {"channels": 3, "kept": [True]}}}, "'a'.*ascending"),
    "channels": ({"version": 2, "units": {"a": {"channels": "3", "kept": [0]}}}, "'a'"),
    "empty": ({"version": 2, "units": {"a": {"channels": 3, "kept": []}}}, "'a'.*ascending"),
    "twice": ({"version": 2, "units": {"a": {"channels": 3, "kept": [0, 0]}}}, "'a'.*ascending"),
    "order": ({"version": 2, "units": {"a": {"channels": 3, "kept": [1, 0]}}}, "'a'.*ascending"),
    "above": ({"version": 2, "units": {"a": {"channels": 3, "kept": [3]}}}, "'a' outside 0…2"),
    "below": ({"version": 2, "units": {"a": {"channels": 3, "kept": [-1, 0]}}}, "'a' outside"),
    "method": ({"version": 2, "units": {}, "method": "echo"}, "'method'"),
    "criterion": ({"version": 2, "units": {}, "criterion": 3}, "'criterion'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_document_is_refused(case: str) -> None:
    document, message = WRONG[case]
    with pytest.raises(lbyl.LbylError, match=message):
        Plan.from_dict(document)


FOREIGN: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "other names": ({"layer9": torch.tensor([0])}, {"layer9": 10}, "'layer9'.*another model"),
    "a layer that cannot be pruned": ({"8": torch.tensor([0])}, {"8": 5}, "'8'.*another model"),
    "other sizes": ({"0": torch.tensor([0])}, {"0": 12}, "12 channels in '0'.*has 10"),
    "out of range": ({"0": torch.tensor([10])}, {"0": 10}, "'0' outside"),
    "not ascending": ({"0": torch.tensor([3, 1])}, {"0": 10}, "'0' must be ascending"),
    "nothing kept": ({"0": torch.tensor([], dtype=torch.long)}, {"0": 10}, "'0'"),
    "a list of floats": ({"0": torch.tensor([0.0, 1.0])}, {"0": 10}, "'0'"),
    "a mask": ({"0": torch.tensor([True, False])}, {"0": 10}, "'0'"),
    "no tensor": ({"0": [0, 1]}, {"0": 10}, "'0'"),
    "no size": ({"0": torch.tensor([0])}, {}, "'0' needs 'kept' and 'channels'"),
    "no indices": ({}, {"0": 10}, "'0' needs 'kept' and 'channels'"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_plan_that_does_not_belong_to_the_model_is_refused(case: str) -> None:
    kept, channels, message = FOREIGN[case]
    model, x = build("chain"), example("chain")
    before = fingerprint(model)
    with pytest.raises(lbyl.LbylError, match=message):
        lbyl.compress(model, x, Plan(kept, channels), method="none")
    assert fingerprint(model) == before


def test_a_plan_must_leave_something_of_every_layer_that_makes_a_part() -> None:
    model, x = Beside(), torch.randn(2, 6)
    graph = lbyl.trace(model, x, residual=True)
    (unit,) = (u for u in graph.units if u.channels == 12)
    for kept, lost in (([0, 4], None), ([5, 7], "left"), ([0, 3], "right")):
        given = Plan({unit.name: torch.tensor(kept)}, {unit.name: 12})
        if lost is None:
            slim = lbyl.compress(model, x, given, method="none", residual=True).model
            assert slim.left.out_features == slim.right.out_features == 1
            continue
        with pytest.raises(lbyl.LbylError, match=f"leaves {lost}.weight without any channel"):
            lbyl.compress(model, x, given, method="none", residual=True)


def test_units_absent_from_a_plan_stay_whole() -> None:
    model, x = build("chain"), example("chain")
    kept: dict[str, Tensor] = {"3": torch.tensor([0, 7])}
    slim = lbyl.compress(model, x, Plan(kept, {"3": 8}), method="none").model
    assert slim[0].out_channels == 10 and slim[3].out_channels == 2


def test_a_plan_of_what_a_plan_made_is_one_of_the_original() -> None:
    first = Plan({"a": torch.tensor([1, 3, 4]), "b": torch.tensor([0])}, {"a": 6, "b": 2})
    later = Plan(
        {"a": torch.tensor([0, 2]), "c": torch.tensor([1])}, {"a": 3, "c": 4}, {"name": "l1"}
    )
    both = first.then(later)
    assert {name: kept.tolist() for name, kept in both.kept.items()} == {
        "a": [1, 4],
        "b": [0],
        "c": [1],
    }
    assert both.channels == {"a": 6, "b": 2, "c": 4} and both.chosen_by == "l1"
    with pytest.raises(lbyl.LbylError, match="expects 6 channels in 'a', and 3 were kept"):
        first.then(Plan({"a": torch.tensor([0])}, {"a": 6}))
    assert first.channels == {"a": 6, "b": 2}


@pytest.mark.parametrize(("kept", "fits"), [([0], True), ([0, 2], True), ([2], True), ([3], False)])
def test_indices_may_be_the_first_and_the_last(kept: list[int], fits: bool) -> None:
    document = {"version": 2, "units": {"a": {"channels": 3, "kept": kept}}}
    if fits:
        assert Plan.from_dict(document).kept["a"].tolist() == kept
    else:
        with pytest.raises(lbyl.LbylError, match="outside 0…2"):
            Plan.from_dict(document)
