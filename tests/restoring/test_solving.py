"""Consumers solved together are those solved one by one, whatever does not hold of some."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl.methods import registry
from lbyl.methods.base import Rewrite
from lbyl.planning.plan import Plan
from lbyl.restoring.correct import known_shift, output_shift
from lbyl.restoring.rewrite import _silencing_requests
from lbyl.restoring.solving import Request, Solution, Solver
from lbyl.statistics import solve
from lbyl.statistics.moments import Statistics
from lbyl.torchkit.assumptions import assuming, holds
from lbyl.torchkit.tensors import is_finite
from support import quick
from support.networks import build, example


@pytest.fixture(scope="module")
def case() -> tuple[Solver, list[Request]]:
    model, x = build("chain", 0), example("chain")
    graph, statistics = lbyl.trace(model, x), quick.statistics(model, x)
    kept = {u.name: torch.arange(0, u.channels, 2) for u in graph.units}
    plan = Plan(kept, {u.name: u.channels for u in graph.units})
    solver = Solver(model, graph, registry.resolve("echo"), statistics)
    requests = _silencing_requests(graph, plan, solver)
    assert requests is not None and len(requests) > 1
    return solver, requests


def equal(one: Solution, other: Solution) -> bool:
    alike = one.values.keys() == other.values.keys() and one.notes == other.notes
    same = [torch.equal(v, other.values[n]) for n, v in one.values.items()]
    return alike and all(same) and (one.error, one.finite) == (other.error, other.finite)


def test_solutions_found_together_are_those_found_with_every_condition_looked_at(
    case: tuple[Solver, list[Request]],
) -> None:
    solver, requests = case
    solver.solve(requests)
    for request in requests:
        assert equal(solver(request), solver._looked_at(request))


def test_what_rests_on_a_condition_that_does_not_hold_is_done_again(
    case: tuple[Solver, list[Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    solver, requests = case
    monkeypatch.setattr(solve, "SOLVED", -1.0)  # no solution counts as one
    solver.solve(requests)
    for request in requests:
        assert equal(solver(request), solver._looked_at(request))


def test_a_covariance_without_a_factor_is_noted_though_solved_with_others(
    case: tuple[Solver, list[Request]],
) -> None:
    solver, requests = case
    assert solver.statistics is not None
    name = requests[0].consumer.name
    moments = dict(solver.statistics.moments)
    bad = moments[name]
    moments[name] = type(bad)(bad.mean, -bad.covariance, bad.taps, bad.spatial, bad.columns)
    other = Solver(solver.model, solver.graph, solver.method, Statistics(moments))
    other.solve(requests)
    found = [other(request) for request in requests]
    assert any(name in note for note in found[0].notes)
    assert not any(one.notes for one in found[1:])


def test_what_is_known_of_a_new_weight_tells_the_same_of_its_output_as_looking_at_it(
    case: tuple[Solver, list[Request]],
) -> None:
    solver, requests = case
    for request in requests:
        original = solver._original(request.consumer)
        assert solver.statistics is not None and original.before is not None
        moments = solver.statistics.moments[request.consumer.name]
        rewrite = Rewrite(
            solver.graph, request.consumer, original.weight, request.columns, {}, {}, moments,
            original.mixed,
        )  # fmt: skip
        new = solver.method.rewrite(rewrite)
        (found,) = rewrite.found
        mean = moments.mean.flatten()[found.rows]
        told = known_shift(original.before, found.flat, mean, found.mixed, found.across)
        seen = output_shift(moments, original.weight, new, request.columns)
        for name in ("mean", "variance", "error", "total"):
            one, other = getattr(told, name), getattr(seen, name)
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_conditions_are_looked_at_outside_and_collected_inside() -> None:
    true, false = torch.tensor(True), torch.tensor(False)
    assert holds(true) and not holds(false)
    with assuming() as conditions:
        assert holds(true) and holds(false) and is_finite(torch.tensor([1.0, torch.nan]))
    assert [bool(c) for c in conditions] == [True, False, False]
    assert not is_finite(torch.tensor([1.0, torch.nan]))
