"""What is chosen where a call leaves it open, and that the result says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lbyl
from lbyl.choosing import Chooser, preferred
from lbyl.inputs import batches
from lbyl.models import resolve
from lbyl.planning.allocation import Allocation
from lbyl.planning.task import Task
from lbyl.restoring.recalibrate import divergence_of
from lbyl.torchkit.tensors import tensors
from support.networks import build, example


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "image_count", lambda shape: 32)


def prepared(name: str = "bottleneck", **options: Any) -> lbyl.Prepared:
    return lbyl.prepare(build(name), example(name), **options)


def test_the_last_is_kept_unless_another_diverges_clearly_less() -> None:
    assert preferred([0.95, 1.0]) == 1  # as chance may have it
    assert preferred([0.85, 1.0]) == 0
    assert preferred([1.0, 0.5]) == 1
    assert preferred([0.5, math.inf]) == 0
    assert preferred([math.inf, math.inf]) == 1
    assert preferred([0.3, 0.2, 1.0]) == 1


def test_without_a_criterion_echo_tries_two_and_keeps_the_preferred() -> None:
    network = prepared()
    result = network.compress({"*": 0.5})
    assert result.allocation is not None
    tried = result.allocation.tried
    assert set(tried) == {"criterion l2", "criterion echo"}
    scores = [tried["criterion l2"], tried["criterion echo"]]
    assert result.chosen_by == ("l2", "echo")[preferred(scores)]
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
    assert isinstance(allocation, Allocation)
    assert allocation.tried[allocation.name] <= allocation.tried["uniform"]
    before, after = (
        getattr(size, "macs" if "macs" in budget else "parameters")
        for size in (result.before, result.after)
    )
    assert after <= 0.6 * before
    assert allocation.name in result.story


def test_a_spared_unit_is_whole_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    network = prepared()
    unit = network.graph.names[0]

    def sparing(counts: Any, channels: Any, *rest: Any) -> Allocation:
        return Allocation({**counts, unit: channels[unit]}, "uniform", {"uniform": 1.0}, (unit,))

    monkeypatch.setattr("lbyl.choosing.spare", sparing)
    result = network.compress(0.5, criterion="l2")
    row = next(row for row in result.rows if row.unit == unit)
    assert row.kept == row.channels and f"{unit} spared" in result.story


def test_own_inputs_are_what_networks_are_compared_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.randn(160, *example("bottleneck").shape[1:])
    network = prepared(data=[own[:12], own[12:]])
    monkeypatch.setattr(
        batches.FreshInputs, "judging", lambda *a: pytest.fail("procedural inputs were drawn")
    )
    assert network.compress({"*": 0.5}).data == "own and procedural"
    held = network.judges.held
    assert held is not None and held.examples == 40
    compared = torch.cat(list(held.batches))
    fitted = torch.cat(list(network.own_parts.fitted.batches))  # type: ignore[union-attr]
    assert not (compared.flatten(1)[:, None] == fitted.flatten(1)[None]).all(-1).any()


def test_what_a_budget_gives_is_what_its_plan_gives() -> None:
    """Solutions that several candidates share are not changed by the networks made of them."""
    network = resolve("lbyl:digits", "shipped")
    digits = lbyl.prepare(network.model, network.example, data=64)
    chosen = digits.compress(lbyl.Budget(macs=0.6))
    again = digits.compress(chosen.plan)
    for name, value in tensors(chosen.model).items():
        assert torch.equal(value, tensors(again.model)[name]), name


@pytest.mark.parametrize("name", ["bottleneck", "chain"])
def test_candidates_are_judged_whole_as_they_are_judged_cut(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = prepared(name)
    before = {n: t.clone() for n, t in tensors(network.model).items()}
    cut = network.compress(lbyl.Budget(macs=0.6))
    monkeypatch.setattr(Chooser, "_cuts_first", False)
    whole = network.compress(lbyl.Budget(macs=0.6))
    assert cut.allocation is not None and whole.allocation is not None
    assert cut.allocation.tried.keys() == whole.allocation.tried.keys()
    for key, score in cut.allocation.tried.items():
        assert whole.allocation.tried[key] == pytest.approx(score, rel=1e-3)
    assert cut.allocation.name == whole.allocation.name
    for one, other in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(before[n], t) for n, t in tensors(network.model).items())


def test_what_the_second_pass_showed_takes_the_place_of_a_further_run() -> None:
    network = prepared()
    chooser = network._chooser(Task.of({"*": 0.5}, "l2", "echo", None), network.statistics())
    trial = chooser.choose()
    judges, slim = network.judges, trial.restored.model
    assert trial.seen is not None
    told = divergence_of(judges.second_pass.original, trial.seen)
    assert told is not None and told > 0
    in_use = judges.whole(slim, 1.0) ** 2
    assert judges.divergence(slim, trial.seen) == pytest.approx(math.sqrt(told * in_use))
    assert judges.divergence(slim, None) == judges.whole(slim)
    # Other inputs, and the same kind of them.
    assert judges.divergence(slim, trial.seen) == pytest.approx(judges.whole(slim), rel=0.5)


def test_only_the_network_that_is_kept_is_cut_where_the_whole_one_can_stand_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = []

    def noting(self: Chooser, plan: lbyl.Plan) -> Any:
        cut.append(plan)
        return restored(self, plan)

    restored = Chooser._restored
    monkeypatch.setattr(Chooser, "_restored", noting)
    monkeypatch.setattr(Chooser, "_cuts_first", False)
    result = prepared().compress(lbyl.Budget(macs=0.6))
    assert result.allocation is not None and len(result.allocation.tried) > 2
    assert [plan.chosen_by for plan in cut] == [result.chosen_by]
