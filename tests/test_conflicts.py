"""Two arguments are both respected, or refused by an error that names both: all pairs of them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.app.sources import zoo
from support import quick
from support.networks import build, example, fingerprint, randomise


class Tied(nn.Module):
    """A block whose last layer is added to its input: units conv1 and conv2, and stem if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv1, self.bn1 = nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.conv3, self.bn3 = nn.Conv2d(10, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn0(self.stem(x)).relu()
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return self.head((x + self.bn3(self.conv3(y))).relu().mean((2, 3)))


X = example("chain")
PLAN = lbyl.Plan({"conv2": torch.tensor([0, 3, 4, 8])}, {"conv2": 10})
pytestmark = pytest.mark.usefixtures("few_images")


@dataclass
class Outcome:
    """A compression that worked, and what it was asked for."""

    result: lbyl.Result
    given: dict[str, Any]
    told: list[Any]  # progress

    def counts(self) -> dict[str, int]:
        return {unit.name: len(self.result.plan.kept[unit.name]) for unit in self.result.graph}


@dataclass(frozen=True)
class Value:
    """A value of an argument that is not its default."""

    argument: str
    value: Any = field(repr=False)
    respected: Callable[[Outcome], bool] = field(repr=False)  # does the result show it?
    word: str = ""  # by which an error names it
    label: str = ""

    def __str__(self) -> str:
        return f"{self.argument}={self.label or self.value}"


def four_tenths(out: Outcome, channels: int) -> int:
    """What a ratio of 0.6 keeps: rounded down, and up to a multiple where one is asked for."""
    step = out.given.get("multiple_of", 1)
    return min(channels, math.ceil(max(1, math.floor(channels * 0.4 + 1e-9)) / step) * step)


def by_ratio(out: Outcome) -> bool:
    return out.counts() == {u.name: four_tenths(out, u.channels) for u in out.result.graph}


def by_pattern(out: Outcome) -> bool:
    whole = {u.name: u.channels for u in out.result.graph}
    return out.counts() == whole | {"conv2": four_tenths(out, 10)}


def by_budget(out: Outcome) -> bool:
    return out.result.after.macs <= 0.9 * out.result.before.macs


def by_plan(out: Outcome) -> bool:
    return out.result.plan is PLAN and out.result.criterion is None


def as_many_as_a_multiple(out: Outcome) -> bool:
    sizes = {u.name: u.channels for u in out.result.graph}
    return all(count % 3 == 0 or count == sizes[name] for name, count in out.counts().items())


def criterion_is(name: str) -> Callable[[Outcome], bool]:
    return lambda out: (out.result.criterion or {}).get("name") == name == out.result.plan.chosen_by


def method_is(name: str) -> Callable[[Outcome], bool]:
    return lambda out: out.result.method["name"] == name


def data_is(source: str) -> Callable[[Outcome], bool]:
    return lambda out: out.result.data == source and source in out.result.story


def only_included(out: Outcome) -> bool:
    return "conv1" not in out.result.graph.names and out.result.model.conv1.out_channels == 8


def nothing_excluded(out: Outcome) -> bool:
    return "conv2" not in out.result.graph.names and out.result.model.conv2.out_channels == 10


def refined(out: Outcome) -> bool:
    refinement = out.result.refinement
    return refinement is not None and refinement.asked == 2 and "refine" in out.result.story


def statistics() -> lbyl.Statistics:
    return quick.statistics(randomise(Tied()), X, 16, residual=True)


VALUES = [
    Value("ratio", 0.6, by_ratio),
    Value("ratio", {"conv2": 0.6}, by_pattern, "'conv2'"),
    Value("ratio", lbyl.Budget(macs=0.9), by_budget, "budget", "budget"),
    Value("ratio", PLAN, by_plan, "plan", "plan"),
    Value("criterion", "l1", criterion_is("l1"), "criterion="),
    Value("criterion", "echo", criterion_is("echo"), "criterion="),
    Value("method", "none", method_is("none"), "'none'"),
    Value("method", "lbyl", method_is("lbyl"), "'lbyl'"),
    Value("method", "fold", method_is("fold"), "'fold'"),
    Value("method", "moments", method_is("moments"), "'moments'"),
    Value("data", 24, data_is("procedural"), "data="),
    Value("data", "analytic", data_is("analytic"), "data="),
    Value("data", example("chain", 32), data_is("own and procedural"), "data=", "own"),
    Value("data", statistics, data_is("procedural"), "data=", "statistics"),
    Value("include", ["stem", "conv[23]"], only_included, "include="),
    Value("exclude", "conv2", nothing_excluded, "excluded"),
    Value("residual", True, lambda out: any(unit.residual for unit in out.result.graph)),
    Value("multiple_of", 3, as_many_as_a_multiple, "multiple_of="),
    Value("refine", 2, refined, "refine"),
    Value("seed", 3, lambda out: out.given["seed"] == 3),
    Value("progress", None, lambda out: bool(out.told)),
]
PAIRS = [(a, b) for a, b in combinations(VALUES, 2) if a.argument != b.argument]

# What contradicts each other; every other pair works.
REFUSED = {
    ("ratio=plan", "criterion=l1"),
    ("ratio=plan", "criterion=echo"),
    ("ratio=plan", "multiple_of=3"),
    ("ratio=plan", "exclude=conv2"),
    ("ratio={'conv2': 0.6}", "exclude=conv2"),
    ("include=['stem', 'conv[23]']", "exclude=conv2"),  # nothing is left to prune
    ("criterion=l1", "method=fold"),
    ("criterion=echo", "method=fold"),
    *{
        (f"method={method}", f"data={data}")
        for method in ("none", "lbyl", "fold")
        for data in ("24", "analytic", "own", "statistics")
    },
}


def test_every_argument_is_swept() -> None:
    arguments = list(inspect.signature(lbyl.compress).parameters)
    assert arguments[:2] == ["model", "example_inputs"]
    assert set(arguments[2:]) == {value.argument for value in VALUES}


def attempt(*values: Value) -> Outcome:
    told: list[Any] = []
    given = {v.argument: v.value() if callable(v.value) else v.value for v in values}
    if "progress" in given:
        given["progress"] = lambda *step: told.append(step)
    model = randomise(Tied())
    before = fingerprint(model)
    try:
        return Outcome(lbyl.compress(model, X, **given), given, told)
    finally:
        assert fingerprint(model) == before


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_each_value_is_respected_alone(value: Value) -> None:
    assert value.respected(attempt(value))


SAMPLE = [  # every tenth in passing, all of them where there is time
    pytest.param(*pair, marks=() if i % 10 == 0 else pytest.mark.slow)
    for i, pair in enumerate(PAIRS)
]


@pytest.mark.parametrize(("first", "second"), SAMPLE, ids=str)
def test_pairs_are_respected_or_refused_by_name(first: Value, second: Value) -> None:
    if (str(first), str(second)) in REFUSED:
        with pytest.raises(lbyl.LbylError) as caught:
            attempt(first, second)
        for value in (first, second):
            assert re.search(re.escape(value.word), str(caught.value)), (value, caught.value)
    else:
        outcome = attempt(first, second)
        assert first.respected(outcome), first
        assert second.respected(outcome), second


def test_a_typo_in_a_pattern_is_refused_with_a_hint() -> None:
    x = torch.zeros(1, 1, 8, 8)
    model = zoo.create("digits", "shipped")
    with pytest.raises(lbyl.LbylError, match=r"exclude='blok\.\*' fits no layer.*'block\.\*'"):
        lbyl.compress(model, x, 0.5, exclude="blok.*")
    with pytest.raises(lbyl.LbylError, match="include='stm' fits no layer"):
        lbyl.compress(model, x, 0.5, include=["block.*", "stm"])
    with pytest.raises(lbyl.LbylError, match="exclude= takes patterns of layer names, not 3"):
        lbyl.compress(model, x, 0.5, exclude=[3])  # type: ignore[list-item]


def separable() -> nn.Module:
    return randomise(
        nn.Sequential(
            nn.Conv2d(3, 8, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 1),
            nn.ReLU(),
            nn.Conv2d(6, 4, 1),
        )
    )


def test_a_depthwise_layer_that_is_named_is_protected() -> None:
    model, x = separable(), torch.randn(2, 3, 6, 6)
    assert lbyl.compress(model, x, 0.5, method="none").model[3].weight.shape[0] == 4
    result = lbyl.compress(model, x, 0.5, method="none", exclude="3")
    assert torch.equal(result.model[3].weight, model[3].weight)
    assert "0" not in result.graph.names and "excluded" in result.graph.unprunable["0"]
    assert result.model[6].out_channels == 3  # the others are cut as before


@pytest.mark.parametrize("layer", ["stem", "conv2"])
def test_one_producer_of_a_residual_unit_that_is_named_is_protected(layer: str) -> None:
    model, x = build("basic"), example("basic")
    cut = lbyl.compress(model, x, 0.5, method="none", residual=True).model
    assert cut.stem.out_channels == cut.conv2.out_channels == 3
    result = lbyl.compress(model, x, 0.5, method="none", residual=True, exclude=layer)
    assert result.model.stem.out_channels == result.model.conv2.out_channels == 6
    assert result.graph.names == ["conv1"]


def test_a_unit_is_included_when_all_its_producers_are() -> None:
    model, x = build("basic"), example("basic")
    graph = lbyl.trace(model, x, residual=True, include="stem")
    assert not graph.units and "include" in graph.unprunable["stem"]
    assert lbyl.trace(model, x, residual=True, include=["stem", "conv2"]).names == ["stem"]


@pytest.mark.parametrize("data", ["no such word", "calibration", 1, 0, True, 2.5, {"x": 1}])
def test_data_that_mean_nothing_are_refused(data: Any) -> None:
    with pytest.raises(lbyl.LbylError, match=r"^data is"):
        lbyl.compress(build("chain"), example("chain"), 0.5, data=data)


def test_statistics_of_another_model_are_refused() -> None:
    foreign = quick.statistics(build("dense"), example("dense"), 16)
    with pytest.raises(lbyl.LbylError, match="statistics belong to another model"):
        lbyl.compress(build("chain"), example("chain"), 0.5, data=foreign)
    same_names = quick.statistics(build("flattened"), example("flattened"), 16)
    with pytest.raises(lbyl.LbylError, match="statistics belong to another model"):
        lbyl.compress(build("chain"), example("chain"), 0.5, data=same_names)


def test_statistics_that_lack_a_layer_are_refused() -> None:
    """Collected with fewer units: what is pruned beyond them would not be restored."""
    model = randomise(Tied())
    some = quick.statistics(model, X, 16)
    assert lbyl.compress(model, X, 0.5, data=some).rows
    with pytest.raises(lbyl.LbylError, match=r"data= know nothing of conv1, head.*residual="):
        lbyl.compress(model, X, 0.5, data=some, residual=True)
    more = quick.statistics(model, X, 16, residual=True)
    assert lbyl.compress(model, X, 0.5, data=more).rows
    analytic = lbyl.prepare(model, X, data="analytic").statistics()  # weights do not tell them all
    assert lbyl.compress(model, X, 0.5, data=analytic, residual=True).rows


def test_sequential_fitting_needs_own_data() -> None:
    method = lbyl.methods.Echo(sequential=True)
    for data in (None, 16, "analytic"):
        with pytest.raises(lbyl.LbylError, match="sequential=True needs data="):
            lbyl.compress(build("chain"), example("chain"), 0.5, method=method, data=data)


def test_own_data_may_serve_refinement_alone() -> None:
    model, x = build("chain"), example("chain", 32)
    result = lbyl.compress(model, x[:2], 0.5, method="none", data=x, refine=2)
    assert result.refinement is not None and result.data is None
