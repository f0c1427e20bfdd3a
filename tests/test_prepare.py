"""A prepared network: traced once, collected once, for as many questions as there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lbyl
from lbyl import api
from lbyl.inputs import batches
from lbyl.planning import elimination
from support import quick
from support.networks import build, example, fingerprint


class Counter:
    """Counts calls of functions, which do as before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.calls: dict[str, int] = {}

    def watch(self, module: Any, name: str, each: bool = False) -> None:
        """Count a function's calls; with `each`, what its first argument lists."""
        original: Callable[..., Any] = getattr(module, name)
        self.calls[name] = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += len(args[0]) if each else 1
            return original(*args, **kwargs)

        self.patch.setattr(module, name, counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counter = Counter(monkeypatch)
    counter.watch(api, "guest_and_graph")
    counter.watch(api, "collect")
    counter.watch(api, "analytic_statistics")
    counter.watch(elimination, "eliminate_together", each=True)
    counter.watch(batches, "match_first_batchnorm")
    monkeypatch.setattr(batches, "image_count", lambda shape: 32)
    return counter.calls


def test_a_budget_traces_once_and_eliminates_once(calls: dict[str, int]) -> None:
    model, x = build("bottleneck"), example("bottleneck")
    result = lbyl.compress(model, x, lbyl.Budget(macs=0.6), criterion="echo")
    assert calls["guest_and_graph"] == calls["collect"] == 1
    assert calls["eliminate_together"] == len(result.graph)
    by_norm = lbyl.compress(model, x, lbyl.Budget(macs=0.6))
    assert calls["guest_and_graph"] == 2 and calls["eliminate_together"] == 2 * len(by_norm.graph)


def test_gains_are_fitted_once_a_call(calls: dict[str, int]) -> None:
    """Collecting, recalibrating and refining share them."""
    lbyl.compress(build("chain"), example("chain"), 0.5, refine=2)
    assert calls["match_first_batchnorm"] == 1


def test_statistics_are_collected_once_for_many_compressions(calls: dict[str, int]) -> None:
    prepared = lbyl.prepare(build("chain"), example("chain"))
    assert calls["collect"] == 0  # when first needed
    for ratio in (0.3, 0.5):
        for method in ("echo", "lbyl", quick.correcting("none", "mean")):
            prepared.compress(ratio, method=method)
    prepared.compress(lbyl.Budget(params=0.5), criterion="echo")
    prepared.plan(0.5, criterion="echo")
    prepared.estimate((0.5,))
    assert calls["guest_and_graph"] == calls["collect"] == calls["match_first_batchnorm"] == 1
    prepared.compress(0.5, method="moments")
    prepared.compress(0.3, method="moments")
    assert calls["collect"] == calls["analytic_statistics"] == 1
    prepared.compress(0.5, method=lbyl.methods.Echo(taps="channels"))
    assert calls["collect"] == 2  # other moments


def test_nothing_is_collected_that_nothing_looks_at(calls: dict[str, int]) -> None:
    prepared = lbyl.prepare(build("chain"), example("chain"))
    for method in ("none", "lbyl", "fold"):
        prepared.compress(0.5, method=method)
    prepared.plan(0.5, method="none")
    assert calls["collect"] == 0
    before = calls["match_first_batchnorm"]
    assert before == 1  # for the inputs that the forecast is told on
    lbyl.compress(build("chain"), example("chain"), 0.5, data=example("chain", 1400))
    assert calls["collect"] == 1 and calls["match_first_batchnorm"] == before
    lbyl.compress(build("chain"), example("chain"), 0.5, data=example("chain", 20))
    # so few that data-free ones stand beside them
    assert calls["collect"] == 2 and calls["match_first_batchnorm"] == before + 1


def test_wrong_ratios_are_refused_before_anything_takes_long(calls: dict[str, int]) -> None:
    prepared = lbyl.prepare(build("chain"), example("chain"))
    for ratio in (1.5, {"nowhere": 0.5}):
        with pytest.raises(lbyl.LbylError):
            prepared.compress(ratio)
    assert calls["collect"] == 0


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
