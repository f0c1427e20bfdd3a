"""What is asked for, resolved, and the plan that comes of it."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl.planning.task import DEFAULT_RATIO, Chosen, Task, make_plan
from support.networks import Beside, build, example


def test_the_channel_that_a_layer_needs_is_the_one_with_the_largest_filters() -> None:
    model = Beside()
    with torch.no_grad():
        for layer in (model.left, model.right, model.sum):
            layer.weight.fill_(1.0)
        model.left.weight[2] *= 5  # of those that `left` makes
        model.sum.weight[7] *= 0.1  # and of all others the least
    graph = lbyl.trace(model, torch.zeros(2, 6), residual=True)
    (unit,) = graph.units
    chosen: Chosen = {}
    last = lbyl.criteria.resolve("random-2")
    plan = make_plan(model, graph, {unit.name: 5}, lbyl.methods.resolve("none"), last, None, chosen)
    assert plan.kept[unit.name].tolist() == [2, 8, 9, 10, 11]
    assert torch.equal(chosen[unit.name, 5], plan.kept[unit.name])


def test_choices_made_before_are_not_made_again() -> None:
    model = build("chain")
    graph = lbyl.trace(model, example("chain"))
    l2, none = lbyl.criteria.resolve("l2"), lbyl.methods.resolve("none")
    known: Chosen = {("0", 4): torch.tensor([0, 1, 2, 9])}
    plan = make_plan(model, graph, {"0": 4, "3": 5}, none, l2, None, known)
    assert plan.kept["0"].tolist() == [0, 1, 2, 9]
    assert set(known) == {("0", 4), ("3", 5)} and len(plan.kept["3"]) == 5
    assert plan.criterion == l2.to_dict() and not plan.method
    norms = model[3].weight.flatten(1).norm(dim=1)
    assert plan.kept["3"].tolist() == sorted(norms.topk(5).indices.tolist())
    whole = make_plan(model, graph, {"0": 10, "3": 8}, none, l2)
    assert whole.kept["0"].tolist() == list(range(10)) and whole.channels == {"0": 10, "3": 8}


def test_methods_that_choose_are_asked_and_named() -> None:
    model = build("chain")
    graph = lbyl.trace(model, example("chain"))
    fold = lbyl.methods.resolve("fold")
    plan = make_plan(model, graph, {"0": 4, "3": 8}, fold, None)
    assert plan.method == fold.to_dict() and not plan.criterion
    assert len(plan.kept["0"]) == 4 and plan.kept["3"].tolist() == list(range(8))


def test_what_is_not_said_has_its_default() -> None:
    task = Task.of(None, None, "none", None)
    assert task.amount == DEFAULT_RATIO == 0.3
    assert task.criteria == (lbyl.criteria.L2(),)
    assert Task.of(None, None, "fold", 8) == Task(0.3, (None,), lbyl.methods.Fold(), 8)
    assert Task.of(0.7, None, "fold", None).amount == 0.7
    tried = Task.of(0.5, None, "echo", None)
    assert [c.name for c in tried.criteria if c is not None] == ["l2", "echo"]
    assert len(Task.of(0.5, "l1", "echo", None).criteria) == 1
    assert len(Task.of(0.5, None, "moments", None).criteria) == 1
    plan = lbyl.Plan({}, {})
    assert Task.of(plan, None, "none", None) == Task(plan, (None,), lbyl.methods.resolve("none"))


@pytest.mark.parametrize(
    ("amount", "criterion", "method", "needed"),
    [
        (0.5, "l2", "none", False),
        (0.5, "echo", "none", True),
        (0.5, "l2", "echo", True),
        (0.5, None, "fold", False),
        (lbyl.Budget(macs=0.5), "l2", "none", True),
        (lbyl.Plan({}, {}), None, "lbyl", False),
    ],
)
def test_statistics_are_needed_by_whatever_looks_at_them(
    amount: float, criterion: str | None, method: str, needed: bool
) -> None:
    assert Task.of(amount, criterion, method, None).needs_statistics == needed


def test_whatever_corrects_needs_statistics() -> None:
    for name, needed in (("none", False), ("mean", True)):
        method = lbyl.methods.LBYL(correction=name)
        assert Task.of(0.5, "l2", method, None).needs_statistics == needed
