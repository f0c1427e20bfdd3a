"""How much of each unit goes: every step of the search against one of its own, from samples on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import lbyl
from lbyl.methods import Echo
from support.attention import block
from support.by_hand import divergence, plan_of, repeated, sampled, statistics_of
from support.networks import build, example

Counts = Mapping[str, int]
Cost = Callable[[Counts], int]


def least(size: int) -> int:
    return max(1, size // 10)


def eliminated(
    gram: Tensor, covariance: Tensor, importance: Tensor
) -> tuple[list[int], list[float]]:
    """Channels in the order they go and the error so far, everything refitted at every step."""
    size = len(gram)
    full = covariance + 0.01 * covariance.diagonal().mean() * torch.eye(size).double()
    gone: list[int] = []
    errors = [0.0]

    def error(some: list[int]) -> float:
        stay = [i for i in range(size) if i not in some]
        cross = full[some][:, stay]
        left = full[some][:, some] - cross @ torch.linalg.solve(full[stay][:, stay], cross.T)
        return float((gram[some][:, some] * left).sum())

    while len(gone) < size - 1:
        costs = {i: error([*gone, i]) - errors[-1] for i in range(size) if i not in gone}
        best = min(costs, key=lambda i: float(importance[i]) * costs[i])
        gone.append(best)
        errors.append(errors[-1] + costs[best])
    return gone, errors


@dataclass
class Search:
    """The search, told again: for a network whose units are each read by one layer."""

    model: nn.Module
    x: Tensor
    prepared: lbyl.Prepared
    cost: Cost
    norms: Mapping[str, str]  # unit → the BatchNorm behind it
    step: int = 1

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: self.prepared.graph[name].channels for name in self.prepared.graph.names}

    @cached_property
    def orders(self) -> dict[str, tuple[list[int], list[float]]]:
        """Unit → its order, and its error as a fraction of what its reader makes of it."""
        found = {}
        for name, size in self.sizes.items():
            (layer,) = self.prepared.graph[name].consumers
            covariance = sampled(self.model, layer, self.x)[1]
            weight = self.model.get_submodule(layer).weight.detach().flatten(1)
            taps = len(covariance) // size
            rows = weight.unflatten(1, (size, taps)).transpose(1, 2).flatten(0, 1)
            blocks = covariance.reshape(size, taps, size, taps)
            covariance = blocks.diagonal(dim1=1, dim2=3).mean(-1)
            importance = torch.ones(size)
            if name in self.norms:
                filters = self.model.get_submodule(name).weight.detach().flatten(1).norm(dim=1)
                importance = (filters / filters.max()) ** 4
            gram = rows.T @ rows
            order, errors = eliminated(gram, covariance, importance)
            total = float((gram * covariance).sum())
            found[name] = order, [min(1.0, max(0.0, e / total)) for e in errors]
        return found

    def kept(self, name: str, count: int) -> list[int]:
        gone = self.orders[name][0][: self.sizes[name] - count]
        return [i for i in range(self.sizes[name]) if i not in gone]

    def plan(self, counts: Counts) -> lbyl.Plan:
        return plan_of(self.prepared.graph, {n: self.kept(n, c) for n, c in counts.items()})

    def rounded(self, name: str, count: int) -> int:
        return min(self.sizes[name], -(-count // self.step) * self.step)

    def along(self, direction: Mapping[str, float], scale: float) -> dict[str, int]:
        found = {}
        for name, size in self.sizes.items():
            count = max(least(size), math.floor(size * (1 - scale * direction[name]) + 1e-9))
            found[name] = self.rounded(name, count)
        return found

    def fit(self, direction: Mapping[str, float], budget: float) -> dict[str, int] | None:
        """A direction gone to the first place that fits: counts change where a channel is gone."""
        places = {
            (gone + 1.01e-9) / (size * direction[name])
            for name, size in self.sizes.items()
            for gone in range(size)
            if direction[name] > 0
        }
        several = (self.along(direction, place) for place in sorted(places))
        return next((counts for counts in several if self.cost(counts) <= budget), None)

    def noise(self, name: str, count: int) -> float:
        error = self.orders[name][1][self.sizes[name] - count]
        return error / max(1 - error, 1e-3)

    def priced(self, weights: Mapping[str, float], budget: float) -> dict[str, int]:
        """The cheapest removals by what they save, until the budget is met."""
        removals = []
        for name, size in self.sizes.items():
            saved = self.cost(self.sizes) - self.cost({**self.sizes, name: size - 1})
            dearest = 0.0
            for count in range(size - 1, 0, -1):
                dearest = max(dearest, self.noise(name, count) - self.noise(name, count + 1))
                removals.append((weights[name] * dearest / saved, name))
        counts, left = dict(self.sizes), sorted(removals)
        while self.cost({n: self.rounded(n, c) for n, c in counts.items()}) > budget:
            name = left.pop(0)[1]
            counts[name] = max(least(self.sizes[name]), counts[name] - 1)
        return {n: self.rounded(n, c) for n, c in counts.items()}

    @cached_property
    def influence(self) -> dict[str, float]:
        """Unit → how far the outputs go for its noise, in a uniform network of 0.6 of the cost."""
        even = self.fit(dict.fromkeys(self.sizes, 1.0), 0.6 * self.cost(self.sizes))
        assert even is not None
        less = {n: c for n, c in even.items() if c < self.sizes[n]}
        told = self.prepared.alone(self.plan({**self.sizes, **less}))
        noise = {n: self.noise(n, c) for n, c in less.items()}
        return {n: told[n] / noise[n] for n in less if noise[n] > 1e-9}

    def candidates(self, fraction: float, uniform: bool = False) -> dict[str, dict[str, int]]:
        budget = fraction * self.cost(self.sizes)
        even = self.fit(dict.fromkeys(self.sizes, 1.0), budget)
        assert even is not None
        made = {"uniform": even}
        base = {n: 1 - c / self.sizes[n] for n, c in even.items()}
        middle = sorted(self.influence.values())[len(self.influence) // 2]
        weights = {n: self.influence.get(n, middle) for n in self.sizes}
        plain = dict.fromkeys(self.sizes, 1.0)
        for kind, part, own in (
            ("predicted 1", 1.0, plain),
            ("measured 0.75", 0.75, weights),
            ("measured 1", 1.0, weights),
        ):
            end = {n: 1 - c / self.sizes[n] for n, c in self.priced(own, budget).items()}
            if uniform:
                mean = sum(end.values()) / len(end)
                end = dict.fromkeys(end, mean)
            blend = {n: (1 - part) * base[n] + part * end[n] for n in end}
            counts = self.fit(blend, budget)
            if counts is not None and counts not in made.values():
                made[kind] = counts
        return made


def perceptron(widths: Sequence[int], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    for layer in layers[::2]:
        layer.weight.data *= 2.5  # so that inputs lead to different answers
    return nn.Sequential(*layers[:-1]).double().eval()


def widths_of(model: nn.Module, counts: Counts) -> list[int]:
    linear = [n for n, m in model.named_children() if isinstance(m, nn.Linear)]
    return [6, *[counts.get(n, 4) for n in linear]]


def search(seed: int, widths: Sequence[int], what: str = "macs", step: int = 1) -> Search:
    model = perceptron([6, *widths, 4], seed)
    if seed == 0:  # some of what one unit makes is read by nobody, and tells nothing by its going
        model[2].weight.data[:, :8] = 0
    x = torch.randn(64, 6).double()

    def cost(counts: Counts) -> int:
        w = widths_of(model, counts)
        return sum(a * b + (b if what == "params" else 0) for a, b in pairwise(w))

    return Search(model, x, lbyl.prepare(model, x[:2], data=repeated(x)), cost, {}, step)


@pytest.mark.parametrize("what", ["macs", "params"])
@pytest.mark.parametrize(("seed", "step"), [(0, 1), (1, 1), (2, 4)])
def test_of_all_candidates_the_one_that_diverges_least_is_kept(
    seed: int, step: int, what: str
) -> None:
    """Costs, prices, what each unit does alone, blends and divergences: all by hand."""
    own = search(seed, [20, 12, 24], what, step)
    for fraction in (0.75, 0.5, 0.3):
        expected = own.candidates(fraction)
        result = own.prepared.compress(
            lbyl.Budget(**{what: fraction}), criterion="echo", multiple_of=step
        )
        allocation = result.allocation
        assert list(allocation.tried) == list(expected)
        assert allocation.name == min(allocation.tried, key=allocation.tried.get)
        assert allocation.counts == expected[allocation.name]
        for name, kept in own.plan(allocation.counts).kept.items():
            assert result.plan.kept[name].tolist() == kept.tolist()
        for name, counts in expected.items():
            slim = own.prepared.compress(own.plan(counts), method=Echo()).model
            far = divergence(own.model, slim, own.x)
            assert allocation.tried[name] == pytest.approx(far, rel=1e-6)
        spent = result.after.macs if what == "macs" else result.after.parameters
        assert spent == own.cost(allocation.counts) <= fraction * own.cost(own.sizes)


def test_convolutions_cost_by_their_positions_and_norms_weigh_by_their_fourth_power() -> None:
    model, x = build("chain").double(), example("chain", 24).double()
    prepared = lbyl.prepare(model, x[:2], data=statistics_of(model, x))

    def cost(counts: Counts) -> int:
        return 64 * (27 * counts["0"] + 9 * counts["0"] * counts["3"]) + 5 * counts["3"]

    own = Search(model, x, prepared, cost, {"0": "1", "3": "4"})
    for fraction in (0.8, 0.55, 0.35):
        expected = own.candidates(fraction)
        result = prepared.compress(lbyl.Budget(macs=fraction), criterion="echo")
        assert list(result.allocation.tried) == list(expected)
        assert result.allocation.counts == expected[result.allocation.name]
        assert result.after.macs == cost(result.allocation.counts)


def test_units_of_one_kind_keep_equally_many_where_that_is_asked_for() -> None:
    own = search(5, [20, 20, 20])
    for fraction in (0.6, 0.4):
        expected = own.candidates(fraction, uniform=True)
        budget = lbyl.Budget(macs=fraction, uniform=True)
        found = own.prepared.compress(budget, criterion="echo").allocation
        assert len(set(found.counts.values())) == 1
        assert list(found.tried) == list(expected) and found.counts == expected[found.name]
    with pytest.raises(lbyl.LbylError, match="uniform widths have no max_error"):
        own.prepared.compress(lbyl.Budget(max_error=0.1, uniform=True))


@pytest.mark.parametrize("limit", [0.002, 0.02, 0.1, 0.5])
def test_a_limit_on_the_error_stops_before_it_is_passed(limit: float) -> None:
    own = search(0, [20, 12, 24])
    for step in (1, 4):
        result = own.prepared.compress(lbyl.Budget(max_error=limit), multiple_of=step)
        for name, size in own.sizes.items():
            gone = max(k for k, e in enumerate(own.orders[name][1]) if e <= limit)
            count = max(least(size), size - gone)
            assert len(result.plan.kept[name]) == min(size, -(-count // step) * step)


def test_a_budget_below_the_smallest_network_is_one_clear_error() -> None:
    own = search(0, [20, 12, 24])
    smallest = own.cost({name: least(size) for name, size in own.sizes.items()})
    part = smallest / own.cost(own.sizes)
    result = own.prepared.compress(lbyl.Budget(macs=part + 1e-9))
    assert result.after.macs == smallest and result.allocation.name == "uniform"
    with pytest.raises(lbyl.LbylError, match=f"cannot be met by pruning alone.*{part:.1%}"):
        own.prepared.compress(lbyl.Budget(macs=part - 1e-9))


@pytest.mark.parametrize("seed", range(7))
def test_a_ratio_spares_units_that_cost_much_and_save_little(seed: int) -> None:
    """Dear units, the dearest first, as long as little is given up; then the whole network says."""
    widths = [(24, 3, 24), (3, 30, 4), (30, 30, 3), (4, 40, 2), (40, 2, 3), (16, 16, 16)]
    widths += [(4, 40, 4, 40, 4)]  # the dearest would give up too much
    own = search(seed, widths[seed])
    for ratio in (0.3, 0.6):
        plain = own.prepared.compress({"*": ratio}, criterion="l2")
        result = own.prepared.compress(ratio, criterion="l2")
        counts = {name: len(kept) for name, kept in plain.plan.kept.items()}
        full = own.cost(own.sizes)
        saving = {n: full - own.cost({**own.sizes, n: c}) for n, c in counts.items()}
        harm = {r.unit: r.error / max(1 - r.error, 1e-3) for r in plain.rows if r.error is not None}
        saving = {n: s for n, s in saving.items() if counts[n] < own.sizes[n]}
        price = {
            n: harm[n] / sum(harm.values()) * sum(saving.values()) / s for n, s in saving.items()
        }
        dear, given = [], 0.0
        for name in sorted(price, key=lambda n: -price[n]):
            given += saving[name] / sum(saving.values())
            if price[name] < 4 or given > 0.1:
                break
            dear.append(name)
        if not dear:
            assert result.allocation is None
            assert {n: len(k) for n, k in result.plan.kept.items()} == counts
            continue
        tried, spared = result.allocation.tried, []
        assert list(tried) == ["uniform", *(f"without {n}" for n in dear)]
        now = tried["uniform"]
        for name in dear:
            trial = {**counts, name: own.sizes[name]}
            part = 1 - (full - own.cost(trial)) / (full - own.cost(counts))
            if 1 - tried[f"without {name}"] / now >= 4 * part:
                counts, now = trial, tried[f"without {name}"]
                spared.append(name)
        assert result.allocation.spared == tuple(spared)
        assert {n: len(k) for n, k in result.plan.kept.items()} == counts


@pytest.mark.parametrize("target", [0.68, 0.8, 0.95])
def test_the_largest_network_within_the_time_is_found(
    target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By seven halvings, and a clock on which half of the time does not follow the widths."""
    own = search(0, [20, 12, 24])

    def clock(part: Callable[[Counts], float]) -> None:
        # private: a clock must be deterministic, and the time of a network is measured inside
        monkeypatch.setattr(lbyl.Prepared, "_time_fraction", lambda self, counts: part(counts))

    def time(counts: Counts) -> float:
        return 0.5 + 0.5 * own.cost(counts) / own.cost(own.sizes)

    clock(time)
    result = own.prepared.compress(lbyl.Budget(latency=target), criterion="echo")
    found = result.allocation
    assert found.name == min(found.tried, key=found.tried.get)
    assert list(found.tried) == list(own.candidates(target))
    smallest = own.cost({name: least(size) for name, size in own.sizes.items()})
    low, high, fitting = 0.0, 1.0, None
    for _ in range(7):
        part = (low + high) / 2
        if part * own.cost(own.sizes) < smallest:
            low = part
            continue
        candidates = own.candidates(part)
        counts = candidates.get(found.name, candidates["uniform"])
        low, high, fitting = (
            (part, high, counts) if time(counts) <= target else (low, part, fitting)
        )
    assert found.counts == fitting
    clock(lambda counts: 1.0)
    with pytest.raises(lbyl.LbylError, match=f"no pruned network takes {target:.0%}"):
        own.prepared.compress(lbyl.Budget(latency=target), criterion="echo")
    measured = iter([target] * 7 + [0.8 * target])
    clock(lambda counts: next(measured))
    with pytest.raises(lbyl.LbylError, match=f"{target:.1%} of .* says {0.8 * target:.1%}"):
        own.prepared.compress(lbyl.Budget(latency=target), criterion="echo")


def test_attention_may_be_left_whole() -> None:
    model, x = block("kernel")
    for include, names in (
        (["*", "*:heads"], {"uniform channels", "uniform channels+qk"}),
        (["*", "*:qk"], {"uniform channels"}),
        (["*"], set()),
    ):
        prepared = lbyl.prepare(model, x, include=include, residual=True, data=x)
        found = prepared.compress(lbyl.Budget(macs=0.9), criterion="l2").allocation
        assert {n for n in found.tried if n.startswith("uniform ")} == names


def odds(p: float) -> float:
    p = min(max(p, 0.01), 0.99)
    return math.log(p / (1 - p))


def promised(own: Search) -> Callable[[float, int], float]:
    """What is kept at least at an agreement on so many inputs, learned from two forecasts."""

    class Wrong(nn.Module):
        def __init__(self, few: int) -> None:
            super().__init__()
            self.few = own.x[:few]

        def forward(self, x: Tensor) -> Tensor:
            bad = (x[:, None] == self.few[None]).all(2).any(1)
            return torch.where(bad[:, None], -own.model(x), own.model(x))

    one, other = (own.prepared.forecast(Wrong(few)) for few in (16, 32))
    assert one is not None and other is not None and other.agreement == 0.5
    slope = (odds(one.kept) - odds(other.kept)) / (odds(0.75) - odds(0.5))

    def middle(p: float) -> float:
        return odds(other.kept) + slope * odds(p)

    def least_of(p: float, n: int) -> float:
        z = 1.645**2 / n
        return (p + z / 2 - math.sqrt(z * p * (1 - p) + z**2 / 4)) / (1 + z)

    below = (middle(0.5) - odds(other.low)) ** 2
    below -= (middle(0.5) - middle(least_of(0.5, other.inputs))) ** 2

    def low(p: float, n: int) -> float:
        gap = math.hypot(below**0.5, middle(p) - middle(least_of(p, n)))
        return 1 / (1 + math.exp(gap - middle(p)))

    return low


@pytest.mark.parametrize("keep", [0.4, 0.6, 0.7, 0.85])
def test_the_smallest_network_that_keeps_enough_is_found_and_checked_on_other_inputs(
    keep: float,
) -> None:
    """Chosen on every second input of those held out; the others decide, or a larger one."""
    own = search(3, [20, 12, 24])
    low = promised(own)

    def kept(counts: Counts, first: int) -> float:
        slim = own.prepared.compress(own.plan(counts), method=Echo()).model
        x = own.x[first::2]
        return low(float((slim(x).argmax(1) == own.model(x).argmax(1)).double().mean()), 192)

    tried = own.prepared.compress(lbyl.Budget(macs=0.6), criterion="echo").allocation.tried
    name, full = min(tried, key=tried.get), own.cost(own.sizes)
    smallest = own.cost({n: least(size) for n, size in own.sizes.items()})

    def named(part: float) -> dict[str, int] | None:
        if part * full < smallest or part >= 1:
            return None
        candidates = own.candidates(part)
        return candidates.get(name, candidates["uniform"])

    lowest, high, size = 0.0, 1.0, 1.0
    for _ in range(7):
        part = (lowest + high) / 2
        counts = named(part)
        if counts is not None and counts != own.sizes and kept(counts, 0) >= keep:
            high = size = part
        else:
            lowest = part
    checked: list[dict[str, int]] = []
    while size < 1 and len(checked) < 4 and not (checked and kept(checked[-1], 1) >= keep):
        counts = named(size)
        if counts is not None and counts != own.sizes and counts not in checked[-1:]:
            checked.append(counts)
        size += 1 / 32
    told = kept(checked[-1], 1)
    if told < keep:
        words = f"last of {len(checked)} sizes keeps at least {told:.1%}"
        with pytest.raises(lbyl.LbylError, match=words):
            own.prepared.compress(lbyl.Budget(keep=keep), criterion="echo")
        return
    result = own.prepared.compress(lbyl.Budget(keep=keep), criterion="echo")
    assert result.allocation.name == name and result.allocation.counts == checked[-1]
    assert result.forecast.inputs == 192 and result.forecast.low == pytest.approx(told)
