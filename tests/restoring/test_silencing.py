"""A unit silenced in the whole network computes what the cut network does."""

from __future__ import annotations

import pytest
import torch

import lbyl
from lbyl.methods import registry
from lbyl.planning.plan import Plan
from lbyl.restoring.rewrite import restore, silencing
from lbyl.restoring.scratch import Scratch
from lbyl.restoring.solving import Solver
from lbyl.torchkit.run import call_model
from lbyl.torchkit.tensors import tensors
from support import quick
from support.networks import NETWORKS, build, example


@pytest.mark.parametrize("name", NETWORKS)
def test_silenced_and_cut_networks_agree(name: str) -> None:
    model, x = build(name, 0), example(name)
    graph = lbyl.trace(model, x)
    statistics = quick.statistics(model, x)
    scratch = Scratch(model)
    before = {n: t.clone() for n, t in tensors(model).items()}
    for unit in graph.units[:3]:
        kept = {u.name: torch.arange(u.channels) for u in graph.units}
        kept[unit.name] = kept[unit.name][: max(1, unit.channels // 2)]
        plan = Plan(kept, {u.name: u.channels for u in graph.units})
        method = registry.resolve("echo")
        slim = restore(model, graph, plan, method, statistics).model
        values = silencing(graph, [plan], Solver(model, graph, method, statistics))[0]
        if values is None:  # a bias is added: there is none to change in the whole network
            assert len(tensors(slim)) > len(tensors(model))
            continue
        with torch.no_grad():
            original = call_model(model, x)
            with scratch.holding(values) as silenced:
                torch.testing.assert_close(
                    call_model(silenced, x), call_model(slim, x), rtol=1e-4, atol=1e-4
                )
            with scratch.holding({}) as whole:  # everything is back as it was
                torch.testing.assert_close(call_model(whole, x), original, rtol=0, atol=0)
    assert all(torch.equal(before[n], t) for n, t in tensors(model).items())


def test_methods_that_write_one_matrix_a_unit_are_asked_by_cutting() -> None:
    model, x = build("chain", 0), example("chain")
    prepared = lbyl.prepare(model, x)
    plan = prepared.plan({"*": 0.5}, method="fold")
    solver = Solver(model, prepared.graph, registry.resolve("fold"), None)
    assert silencing(prepared.graph, [plan], solver) == [None]
