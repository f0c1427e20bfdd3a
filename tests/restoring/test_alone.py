"""One unit pruned at a time, whichever way that is run, and how far outputs then are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.methods import Echo
from support.by_hand import divergence, plan_of, repeated
from support.fuzz.architectures import draw
from support.networks import NETWORKS, build, example, fingerprint


def halved(graph: lbyl.Graph) -> lbyl.Plan:
    return plan_of(graph, {u.name: range(0, u.channels, 2) for u in graph.units})


@pytest.mark.parametrize("name", [*NETWORKS, "folded"])
def test_a_unit_alone_does_what_its_cut_network_does(name: str) -> None:
    """Told of networks with values silenced that run together; compared with each one, cut."""
    method: Any = Echo(correction="mean+variance")
    if name == "folded":
        name, method = "chain", lbyl.methods.Fold()
    model, x = build(name).double(), example(name, 16).double()
    before = fingerprint(model)
    prepared = lbyl.prepare(model, x[:2], data=repeated(x))
    plan = halved(prepared.graph)
    told = prepared.alone(plan, method)
    assert list(told) == prepared.graph.names and fingerprint(model) == before
    for unit, far in told.items():
        slim = prepared.compress(plan_of(prepared.graph, {unit: plan.kept[unit]}), method=method)
        assert far == pytest.approx(divergence(model, slim.model, x), rel=1e-6)
    assert prepared.alone(plan, method, units=[unit]) == {unit: pytest.approx(far, rel=1e-6)}


class Early(nn.Module):
    """Has something from before a layer that differs: rows, or values that it changes in place."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4)
        )
        self.last, self.what = nn.Linear(6, 3), what

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            early = x.clone() if self.what != "positions" else x.transpose(0, 1)
            if self.what == "+=":
                early += part(x)
            elif self.what == "add_":
                early.add_(part(x))  # what it gives is dropped
            elif self.what == "copy_":
                early.copy_(part(x))
            elif self.what == "positions":  # rows of its layers are positions, not examples
                early = part(early).transpose(0, 1)
            else:
                early = torch.zeros(len(x), 6).to(x) + part(x)
            x = early
        out: Tensor = self.last(x if self.what != "positions" else x.mean(1))
        return out


@pytest.mark.parametrize("what", ["+=", "add_", "copy_", "rows", "positions"])
def test_networks_that_look_back_or_whose_rows_are_no_examples_are_judged_rightly(
    what: str,
) -> None:
    model, shape = Early(what).double().eval(), (16, 5, 6) if what == "positions" else (16, 6)
    x = torch.randn(shape).double()
    prepared = lbyl.prepare(model, x[:2], data=repeated(x))
    plan, method = halved(prepared.graph), Echo(correction="mean")
    for unit, far in prepared.alone(plan, method).items():
        slim = prepared.compress(plan_of(prepared.graph, {unit: plan.kept[unit]}), method=method)
        assert far == pytest.approx(divergence(model, slim.model, x), rel=1e-6)


def test_random_networks_run_together_as_they_run_alone() -> None:
    for seed in range(8):
        drawn = draw(seed)
        prepared = lbyl.prepare(drawn.model.eval(), drawn.inputs, data=16)
        if not prepared.graph.names:
            continue
        plan = halved(prepared.graph)
        for unit, far in prepared.alone(plan).items():
            alone = prepared.alone(plan, units=[unit])[unit]
            assert far == pytest.approx(alone, rel=0.02, abs=1e-6), (seed, unit)


def test_a_network_does_not_diverge_from_itself_and_answers_are_compared_at_any_scale() -> None:
    model, x = build("dense").double(), example("dense", 64).double()
    told = []
    for scale in (1.0, 100.0):
        with torch.no_grad():
            model[6].weight *= scale
            model[6].bias *= scale
        prepared = lbyl.prepare(model, x[:2], data=repeated(x))
        itself = prepared.forecast(model)
        assert itself is not None and abs(itself.divergence) < 1e-9
        told.append(prepared.alone(halved(prepared.graph)))
    assert told[0] == pytest.approx(told[1], rel=1e-6)
    broken = prepared.forecast(nn.Sequential(model, nn.Threshold(math.inf, math.nan)))
    assert broken is not None and not math.isfinite(broken.divergence)


class Halved(Echo):
    """Rewrites otherwise, which no one else knows how to do for several at once."""

    def rewrite(self, rewrite: Any) -> Any:
        return super().rewrite(rewrite) / 2


@pytest.mark.parametrize(
    ("name", "method"),
    [("chain", Echo()), ("bottleneck", Echo()), ("dense", Echo()), ("chain", Halved())],
)
def test_layers_of_one_shape_solved_in_one_go_are_those_solved_one_by_one(
    name: str, method: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build(name).double(), example(name, 16).double()
    results = []
    for together in (False, True):
        # private: only an accelerator solves several at once, and none is at hand here
        monkeypatch.setattr("lbyl.restoring.solving.Solver.in_groups", together)
        prepared = lbyl.prepare(model, x[:2], data=64)
        results.append(prepared.compress(lbyl.Budget(macs=0.6), method=method))
    one, other = (result.model.state_dict() for result in results)
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-6, atol=1e-8)
    assert results[0].allocation.tried == pytest.approx(results[1].allocation.tried)
