"""A prepared network: traced once, collected once, for as many questions as there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from support import quick
from support.networks import build, example, fingerprint

pytestmark = pytest.mark.usefixtures("few_images")


class Watched:
    """A prepared network that tells how often it collected statistics."""

    def __init__(self, name: str = "chain", **options: Any) -> None:
        self.collections = 0
        self.prepared = lbyl.prepare(build(name), example(name), progress=self.note, **options)

    def note(self, stage: str, step: int, steps: int) -> None:
        self.collections += stage == "collecting" and step == 1


def test_statistics_are_collected_once_for_many_compressions() -> None:
    watched = Watched()
    prepared = watched.prepared
    assert watched.collections == 0  # when first needed
    for ratio in (0.3, 0.5):
        for method in ("echo", "lbyl", quick.correcting("none", "mean")):
            prepared.compress(ratio, method=method)
    prepared.compress(lbyl.Budget(params=0.5), criterion="echo")
    prepared.plan(0.5, criterion="echo")
    prepared.estimate((0.5,))
    prepared.compress(0.5, method="moments")  # which asks the weights
    assert watched.collections == 1
    assert prepared.statistics() is prepared.statistics()
    prepared.compress(0.5, method=lbyl.methods.Echo(taps="channels"))
    assert watched.collections == 2  # other moments


def test_nothing_is_collected_that_nothing_looks_at() -> None:
    watched = Watched()
    for method in ("none", "lbyl", "fold"):
        watched.prepared.compress(0.5, method=method)
    watched.prepared.plan(0.5, method="none")
    for ratio in (1.5, {"nowhere": 0.5}):  # refused before anything takes long
        with pytest.raises(lbyl.LbylError):
            watched.prepared.compress(ratio)
    assert watched.collections == 0


@pytest.mark.parametrize("method", ["echo", "lbyl", "moments"])
def test_a_prepared_network_compresses_as_the_function_does(method: str) -> None:
    model, x = build("chain"), example("chain")
    before = fingerprint(model)
    prepared = lbyl.prepare(model, x, data=quick.data_for(0.5, method, None))
    prepared.compress(0.3, method=method)
    again = prepared.compress(0.5, method=method, refine=2)
    direct = quick.compress(model, x, 0.5, method=method, refine=2)
    assert torch.equal(again.model(x), direct.model(x))
    assert fingerprint(model) == before


def test_plans_are_those_that_compressions_follow() -> None:
    prepared = lbyl.prepare(build("bottleneck"), example("bottleneck"), data=32)
    for amount in (0.5, {"conv2": 0.3}, lbyl.Budget(macs=0.5)):
        plan = prepared.plan(amount, criterion="echo")
        result = prepared.compress(amount, criterion="echo")
        assert result.plan.to_dict() == plan.to_dict()
        assert torch.equal(
            prepared.compress(plan).model(example("bottleneck")),
            result.model(example("bottleneck")),
        )


def test_results_are_refined_further_and_stay_as_they_were() -> None:
    model, x = build("basic"), example("basic")
    prepared = lbyl.prepare(model, x, data=32)
    plain = prepared.compress(0.5)
    before = fingerprint(plain.model)
    refined = prepared.refine(plain, 20)
    assert fingerprint(plain.model) == before and plain.refinement is None
    assert refined.refinement is not None and refined.refinement.steps == 20
    assert refined.plan is plain.plan and refined.rows == plain.rows
    alone = lbyl.refine(model, x, plain, 20, data=32)
    assert torch.equal(alone.model(x), refined.model(x))
    assert torch.equal(prepared.compress(0.5, refine=20).model(x), refined.model(x))


def test_estimates_are_those_of_the_function() -> None:
    model, x = build("chain"), example("chain")
    found = lbyl.estimate(model, x, (0.5,), methods=("none", "fold"), data=32)
    again = lbyl.prepare(model, x, data=32).estimate((0.5,), methods=("none", "fold"))
    assert found.to_dict() == again.to_dict()
    assert [point.method for point in found.points] == ["none", "fold"]


def test_a_loader_that_runs_out_serves_every_question() -> None:
    model, x = build("chain"), example("chain", 60)
    prepared = lbyl.prepare(model, x[:2], data=(part for part in x.split(20)))
    first = prepared.compress(0.5)
    second = prepared.compress(0.5, method=lbyl.methods.Echo(sequential=True), refine=2)
    assert first.data == second.data == "own and procedural"
    assert second.corrections.sequential == 2


@pytest.mark.parametrize("criterion", ["l2", "echo"])
def test_statistics_serve_a_network_that_was_trained_on_since(
    criterion: str, tmp_path: Path
) -> None:
    """Nothing of the weights they were collected with is taken for those of now."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *convolutions, nn.Conv2d(8, 4, 3)).eval()
    x = torch.zeros(1, 3, 12, 12)
    statistics = lbyl.prepare(model, x, data=16).statistics()
    assert any(m.mixed is not None for m in statistics.moments.values())
    lbyl.compress(model, x, {"*": 0.5}, criterion=criterion, data=statistics)
    statistics.save(tmp_path / "statistics.safetensors")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    known = lbyl.Statistics.load(tmp_path / "statistics.safetensors")
    held, read = (
        lbyl.compress(model, x, {"*": 0.5}, criterion=criterion, data=data)
        for data in (statistics, known)
    )
    torch.testing.assert_close(held.model.state_dict(), read.model.state_dict())
