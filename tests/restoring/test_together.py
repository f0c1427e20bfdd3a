"""Consumers of one shape solved in one go are those solved one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lbyl
from lbyl.methods import registry
from lbyl.planning.plan import Plan
from lbyl.restoring import together
from lbyl.restoring.rewrite import _silencing_requests
from lbyl.restoring.solving import Request, Solver
from lbyl.statistics.moments import Moments, Statistics
from lbyl.statistics.solve import Regression, deliver_together, deliver_weight
from support import quick
from support.networks import NETWORKS, build, example

TAPS = 3


def requests_of(solver: Solver, shares: list[float]) -> list[Request]:
    """What several plans ask for: random channels, of every unit another share."""
    graph = solver.graph
    asked: list[Request] = []
    for number, share in enumerate(shares):
        generator = torch.Generator().manual_seed(number)
        kept = {}
        for i, unit in enumerate(graph.units):
            count = max(1, int(unit.channels * share) - i % 2)
            kept[unit.name] = torch.randperm(unit.channels, generator=generator)[:count].sort()[0]
        plan = Plan(kept, {u.name: u.channels for u in graph.units})
        asked += _silencing_requests(graph, plan, solver) or []
    return list({request.key: request for request in asked}.values())


def solver_of(name: str, together: bool, dtype: torch.dtype = torch.float32) -> Solver:
    model, x = build(name, 0), example(name)
    graph, statistics = lbyl.trace(model, x), quick.statistics(model, x)
    solver = Solver(model.to(dtype), graph, registry.resolve("echo"), statistics, True)
    solver.in_groups = together
    return solver


@pytest.mark.parametrize("name", NETWORKS)
def test_solutions_in_one_go_are_those_one_by_one(name: str) -> None:
    one, other = solver_of(name, True), solver_of(name, False)
    requests = requests_of(one, [0.8, 0.5, 0.3])
    one.solve(requests)
    other.solve(requests)
    for request in requests:
        a, b = one(request), other(request)
        assert a.values.keys() == b.values.keys() and a.notes == b.notes
        for key, value in a.values.items():
            assert value.dtype == b.values[key].dtype
            torch.testing.assert_close(value, b.values[key], rtol=1e-5, atol=1e-6)
        assert a.error == pytest.approx(b.error, rel=1e-7, abs=1e-12)


def test_several_consumers_really_are_solved_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def noting(*args: object) -> object:
        sizes.append(len(args[1]))  # type: ignore[arg-type]
        return original(*args)  # type: ignore[arg-type]

    original = together.solve_together
    monkeypatch.setattr("lbyl.restoring.solving.solve_together", noting)
    solver = solver_of("chain", True)
    requests = requests_of(solver, [0.5, 0.52, 0.54])
    solver.solve(requests)
    assert sum(sizes) > len(sizes) > 0


def bad_at(statistics: Statistics, name: str) -> Statistics:
    moments = dict(statistics.moments)
    bad = moments[name]
    moments[name] = Moments(bad.mean, -bad.covariance, bad.taps, bad.spatial, bad.columns)
    return Statistics(moments)


def test_a_covariance_without_a_factor_is_noted_and_harms_no_other() -> None:
    solver = solver_of("chain", True)
    requests = requests_of(solver, [0.5, 0.6])
    assert solver.statistics is not None
    name = requests[0].consumer.name
    other = Solver(solver.model, solver.graph, solver.method, bad_at(solver.statistics, name), True)
    other.in_groups = True
    solver.solve(requests)
    other.solve(requests)
    for request in requests:
        a, b = solver(request), other(request)
        if request.consumer.name == name:
            assert any(name in note for note in b.notes)
        else:
            assert not b.notes
            for key, value in a.values.items():
                torch.testing.assert_close(value, b.values[key], rtol=1e-5, atol=1e-6)


def test_values_too_large_for_half_precision_are_seen() -> None:
    solver = solver_of("chain", True, torch.float16)
    requests = requests_of(solver, [0.5, 0.55])
    with torch.no_grad():
        for request in requests:
            solver.state[request.consumer.weight].mul_(3e4)
    solver.solve(requests)
    found = [solver(request) for request in requests]
    for one in found:
        finite = all(bool(value.isfinite().all()) for value in one.values.values())
        assert one.finite == finite
    assert not all(one.finite for one in found)


def problems(count: int, rows: int) -> Iterator[Regression]:
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        root = torch.randn(rows, rows, generator=generator, dtype=torch.float64)
        covariance = root @ root.T / rows
        flat = torch.randn(5, rows, generator=generator, dtype=torch.float64)
        kept = torch.rand(3, rows // TAPS, generator=generator) < 0.3 + 0.2 * i
        kept[:, 0] = True
        yield Regression(flat, covariance, flat @ covariance, kept, TAPS)


def test_regressions_side_by_side_are_filled_up_without_a_trace() -> None:
    several = list(problems(3, 24))
    found = deliver_together(several, 0.01)
    assert bool(found.good.all())
    number = 0
    for one in several:
        for flags in one.kept.repeat_interleave(TAPS, 1):
            kept, pruned = flags.nonzero()[:, 0], (~flags).nonzero()[:, 0]
            alone = deliver_weight(one.flat, one.covariance, kept, pruned, 0.01, one.mixed)
            for mine, theirs in (
                (found.weight, alone.weight), (found.mixed, alone.mixed),
                (found.across, alone.across),
            ):  # fmt: skip
                assert theirs is not None
                own = mine[number, :, : len(kept)]
                torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-12)
                assert not bool(mine[number, :, len(kept) :].any())
            assert found.rows[number, : len(kept)].tolist() == kept.tolist()
            number += 1
