"""Budgets, what channels cost, and the predicted error of pruning them.

Backward elimination gives, for every unit and without data, what each further pruned channel adds
to the error at its consumers. Channels are pruned where that is least per multiply–accumulate (or
parameter) saved; one threshold on the price serves all units, found by bisection. `allocation`
weighs these predictions against what the whole network does. An error inside a residual block
counts by the block's fraction of the residual sum.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.unit import Graph, Producer, Unit
from lbyl.graph.weights import UnitWeights, unit_weights
from lbyl.planning.elimination import EchoCriterion
from lbyl.planning.grouped import group_views
from lbyl.planning.ratio import Steps, rounded_up, step_of
from lbyl.runtime.tensors import numbers, tensors
from lbyl.statistics.moments import Statistics
from lbyl.surgery.indices import Kept, kept_along, kept_mask

LEAST_KEPT = 0.1  # fraction of a unit's channels that is always kept


@dataclass(frozen=True)
class Curve:
    """Predicted relative error of a unit at its consumers, by how many channels are pruned."""

    error: Tensor  # (m,): error[k] with k channels pruned, 0 … 1, never falling
    influence: float = 1.0  # the fraction of its consumers' output in what follows

    @property
    def price(self) -> Tensor:
        """(m − 1,): what each removal adds, made non-decreasing so that a threshold is a prefix."""
        noise = self.error / (1 - self.error).clamp(min=1e-3)  # noise to signal: no layer is wiped
        return self.influence * torch.cummax(noise.diff(), 0).values


def curves(model: nn.Module, graph: Graph, statistics: Statistics) -> dict[str, Curve]:
    """The error curve of every unit, by the criterion `echo`."""
    weights = unit_weights(graph, model)
    fractions = unit_influence(model, graph)
    EchoCriterion().prepare(list(weights.values()), statistics)
    made = {}
    totals = dict(zip(weights, numbers([_total(own, statistics) for own in weights.values()])))
    for unit in graph.units:
        order = EchoCriterion().order(weights[unit.name], statistics)
        total = totals[unit.name]
        costs = torch.tensor([0.0, *(cost for _, cost in order)], dtype=torch.float64)
        error = (costs.clamp(min=0).cumsum(0) / total).clamp(max=1.0)
        made[unit.name] = Curve(error, fractions[unit.name])
    return made


def _total(weights: UnitWeights, statistics: Statistics) -> Tensor:
    """What the consumers of a unit, whose order is known, make of all its channels."""
    if weights.unit.kind != "channels":
        views = group_views(weights, statistics)
        return torch.tensor(max(sum(v.total for v in views), 1e-30) if views else 1.0).double()
    return statistics.totals.get(weights.unit.name, torch.tensor(1.0).double())


def unit_influence(model: nn.Module, graph: Graph) -> dict[str, float]:
    """Unit → the largest fraction that one of its consumers has in the sum it is added to."""
    by_layer = influence(model, graph.all_units)
    return {
        unit.name: max((by_layer.get(c, 1.0) for c in unit.consumers), default=1.0)
        for unit in graph.units
    }


def influence(model: nn.Module, units: Sequence[Unit]) -> dict[str, float]:
    """Layer → fraction of its output in the variance of the residual sum it is added to.

    BatchNorm keeps the variance of each layer's output in γ². A layer inside a block has the
    fraction of the block's last layer. `units` are those of a network with its residual ones.
    """
    state = tensors(model)
    fractions: dict[str, float] = {}
    for unit in units:
        if unit.residual:
            power = 0.0
            for producer in unit.producers:
                own = _power(producer, state)
                power += own
                fractions[producer.name] = own / power if own else 1.0
    for unit in reversed(units):  # later layers first: inner ones look at what follows
        if not unit.residual:
            after = max((fractions.get(c, 1.0) for c in unit.consumers), default=1.0)
            fractions |= {p.name: after for p in unit.producers}
    return fractions


def _power(producer: Producer, state: Mapping[str, Tensor]) -> float:
    """Variance of a layer's output summed over channels, 0 where there is no BatchNorm with γ."""
    norm = producer.norm
    if norm is None or norm.weight is None:
        return 0.0
    return float(state[norm.weight].detach().double().square().sum())


class Sizes:
    """Sizes of all parameters as a function of how many channels of each unit are kept.

    Along each axis a size is linear in the numbers of pruned channels, so that all of them are one
    product: searches ask hundreds of times. Parameters that take no part in the recorded run count
    as those of `model` do, and so do the biases that its `bare` consumers get when they lose
    inputs: a mean that is put back needs a place.
    """

    def __init__(
        self, graph: Graph, model: nn.Module | None = None, bare: Sequence[str] = ()
    ) -> None:
        self.graph = graph
        self.bare = [graph.consumers[name] for name in bare]
        self.units = list(graph.units)
        self.names = list(graph.shapes)
        column = {unit.name: i for i, unit in enumerate(graph.units)}
        owned = {axis: units for axis, units in graph.units_of.items() if units}
        # A slot for every axis that carries channels; parameters with fewer have slots of size 1.
        slots = {
            name: [a for a in range(len(s)) if (name, a) in owned]
            for name, s in graph.shapes.items()
        }
        most = max((len(axes) for axes in slots.values()), default=0)
        shape = (len(self.names), most, len(self.units))
        self._channels = np.array([u.channels for u in self.units], dtype=np.float64)
        pruned, self._heads = np.zeros(shape), np.zeros(shape)
        self._full, self._fixed = np.ones(shape[:2]), np.ones(len(self.names))
        for row, name in enumerate(self.names):
            sizes = graph.shapes[name]
            self._fixed[row] = math.prod(s for a, s in enumerate(sizes) if a not in slots[name])
            for slot, a in enumerate(slots[name]):
                self._full[row, slot] = sizes[a]
                for unit in owned[name, a]:
                    mine = int(unit.owns(graph.axes[name, a]).sum()) / unit.channels
                    if unit.kind == "heads":  # takes its part of what else is left on the axis
                        self._heads[row, slot, column[unit.name]] = mine / sizes[a]
                    else:
                        pruned[row, slot, column[unit.name]] = mine
        self._pruned = pruned.reshape(-1, len(self.units))  # slots of all one below the other
        self._has_heads = any(unit.kind == "heads" for unit in self.units)
        index = {name: i for i, name in enumerate(self.names)}
        self._layers = np.array([index[layer.weight] for layer in graph.layers], dtype=np.int64)
        self._positions = np.array([layer.positions for layer in graph.layers], dtype=np.float64)
        self._counted = np.ones(len(self.names), dtype=bool)
        self._elsewhere = 0  # parameters that the recorded run did not reach
        if model is not None:
            own = dict(model.named_parameters())
            self._counted = np.array([name in own for name in self.names], dtype=bool)
            here = sum(math.prod(graph.shapes[name]) for name in self.names if name in own)
            self._elsewhere = sum(p.numel() for p in own.values()) - here
        reading = [{u.name for u in graph.units_of.get((c.weight, c.axis), ())} for c in self.bare]
        self._reads = np.array(
            [[unit.name in names for unit in self.units] for names in reading], dtype=np.float64
        ).reshape(len(self.bare), len(self.units))
        self._outputs = np.array([graph.shapes[c.weight][c.output_axis] for c in self.bare])

    def all(self, counts: Mapping[str, int]) -> NDArray[np.float64]:
        """Elements of every parameter when `counts` channels of each unit are kept."""
        left = np.array([counts[unit.name] for unit in self.units], dtype=np.float64)
        gone = self._channels - left
        along = self._full - self._pruned.dot(gone).reshape(self._full.shape)
        if self._has_heads:
            along = along * (1 - self._heads @ gone)
        return np.asarray((self._fixed * along.prod(1)).round())

    def macs(self, counts: Mapping[str, int]) -> int:
        layers = int((self._positions * self.all(counts)[self._layers]).sum())
        return (self.graph.fixed_macs + layers) // self.graph.batch

    def parameters(self, counts: Mapping[str, int]) -> int:
        gone = np.array([u.channels > counts[u.name] for u in self.units], dtype=np.float64)
        biases = self._outputs[self._reads.dot(gone) > 0].sum()  # of what they lose, none is missed
        return int(self.all(counts)[self._counted].sum() + biases) + self._elsewhere

    def of_plan(self, kept: Kept, what: str) -> int:
        """The cost of a plan to the last element: "parameters" or "macs"."""
        mask = kept_mask(self.graph, kept)
        shapes = {name: list(shape) for name, shape in self.graph.shapes.items()}
        for (name, axis), channel in self.graph.axes.items():
            shapes[name][axis] = int(kept_along(channel, mask).sum())
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        if what == "macs":
            return self.graph.macs(sizes)
        counts = {unit.name: len(kept[unit.name]) for unit in self.units}
        estimate = self.all(counts)[self._counted].sum()
        exact = sum(sizes[name] for name, here in zip(self.names, self._counted) if here)
        return self.parameters(counts) + int(exact - estimate)


@dataclass(frozen=True)
class Budget:
    """What may be left of a network, given as exactly one of these.

    `macs`, `params` and `latency` are fractions of the original's; `keep` is the fraction of its
    accuracy that the smallest network found is forecast to keep at least; `max_error` is the
    largest predicted error of a layer. Of several allocations within the budget the one is kept
    whose network diverges least from the original. With `uniform` layers of one kind, those whose
    names differ in numbers alone, keep equally many channels: a configuration can say such a
    network.
    """

    macs: float | None = None
    params: float | None = None
    latency: float | None = None
    max_error: float | None = None
    keep: float | None = None
    uniform: bool = False

    def __post_init__(self) -> None:
        amounts = {name: value for name, value in asdict(self).items() if name != "uniform"}
        given = {name: value for name, value in amounts.items() if value is not None}
        if not isinstance(self.uniform, bool):
            raise LbylError(f"uniform is {self.uniform!r}: it must be True or False")
        if len(given) != 1:
            names = ", ".join(given or amounts)
            raise LbylError(f"a budget is exactly one of {names}, not {len(given)} of them")
        for name, value in given.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value <= 1:
                raise LbylError(f"{name} is {value!r}: it must be above 0 and at most 1")


def check_budget(sizes: Sizes, budget: Budget, steps: Steps) -> None:
    """One clear error, before anything takes long, for a budget that no pruning meets."""
    full = {unit.name: unit.channels for unit in sizes.units}
    least = {
        name: min(count, rounded_up(least_kept(count), step_of(steps, name)))
        for name, count in full.items()
    }
    for what, asked, cost in (
        ("macs", budget.macs, sizes.macs),
        ("params", budget.params, sizes.parameters),
    ):
        if asked is not None and cost(least) > asked * cost(full):
            raise LbylError(
                f"the budget {what}={asked} cannot be met by pruning alone: even the smallest "
                f"network allowed has {cost(least) / cost(full):.1%}; ask for more, or offer more "
                "to prune (residual=True, include=)"
            )


def kinds(channels: Mapping[str, int]) -> dict[str, str]:
    """Unit → its kind: the name without its numbers, and its width."""
    return {name: f"{re.sub(r'[0-9]+', '*', name)} {size}" for name, size in channels.items()}


def made_uniform(values: Mapping[str, float], kind: Mapping[str, str]) -> dict[str, float]:
    """Values by unit with each that of the middle of its kind."""
    by_kind: dict[str, list[float]] = {}
    for name, value in values.items():
        by_kind.setdefault(kind[name], []).append(value)
    means = {k: sum(some) / len(some) for k, some in by_kind.items()}
    return {name: means[kind[name]] for name in values}


def least_kept(channels: int) -> int:
    """How many channels of a unit always stay."""
    return max(1, int(LEAST_KEPT * channels))


def within_error(
    curves: Mapping[str, Curve], max_error: float, multiple_of: Steps
) -> dict[str, int]:
    """Unit → channels that stay when no unit's predicted error passes a limit."""
    ordered = {n: _ordered(c.error[1:]) for n, c in curves.items()}
    return {n: _kept(c, ordered[n], max_error, step_of(multiple_of, n)) for n, c in curves.items()}


def savings(full: Mapping[str, int], measure: Callable[[Mapping[str, int]], int]) -> dict[str, int]:
    """Elements of cost that a channel of each unit saves."""
    whole = measure(full)
    return {name: whole - measure({**full, name: full[name] - 1}) for name in full}


def prices(curves: Mapping[str, Curve], saved: Mapping[str, int]) -> dict[str, Tensor]:
    """Error added per element of cost saved, for every removal of every unit."""
    return {name: curve.price / max(saved[name], 1) for name, curve in curves.items()}


def _ordered(prices: Tensor) -> list[float]:
    """Prices of which searches ask again and again how many are under a limit."""
    return prices[~prices.isnan()].sort().values.tolist()


def _kept(curve: Curve, prices: list[float], limit: float, multiple_of: int | None) -> int:
    """Channels kept when every removal priced under the limit is made."""
    channels = len(curve.error)
    count = max(least_kept(channels), channels - bisect_right(prices, limit))
    return min(channels, rounded_up(count, multiple_of))


def bisect_prices(
    curves: Mapping[str, Curve],
    prices: Mapping[str, Tensor],
    measure: Callable[[Mapping[str, int]], int],
    budget: float,
    multiple_of: Steps,
) -> dict[str, int]:
    """The lowest price limit at which the network fits the budget."""
    ordered = {n: _ordered(prices[n]) for n in curves}

    def counts(limit: float) -> dict[str, int]:
        return {n: _kept(c, ordered[n], limit, step_of(multiple_of, n)) for n, c in curves.items()}

    whole = {n: len(c.error) for n, c in curves.items()}
    if measure(whole) <= budget:
        return whole
    every = torch.cat(list(prices.values())).clamp(min=0).sort().values
    low, high = -1, len(every) - 1
    if measure(counts(float(every[high]))) > budget:
        raise LbylError(
            "the budget cannot be met by pruning alone: even the smallest network allowed is "
            f"{measure(counts(float(every[high]))):,} against {budget:,.0f}"
        )
    while high - low > 1:
        index = (low + high) // 2
        fits = measure(counts(float(every[index]))) <= budget
        low, high = (low, index) if fits else (index, high)
    over = counts(float(every[low])) if low >= 0 else whole
    return _between(over, counts(float(every[high])), measure, budget, multiple_of)


def _between(
    over: Mapping[str, int],
    under: Mapping[str, int],
    measure: Callable[[Mapping[str, int]], int],
    budget: float,
    multiple_of: Steps,
) -> dict[str, int]:
    """As close to the budget as a mixture of two neighbouring allocations comes.

    Removals of one price come in blocks; taking only part of a block spends the whole budget.
    """
    best, low, high = dict(under), 0.0, 1.0
    for _ in range(12):
        fraction = (low + high) / 2
        tried = {n: under[n] + int(fraction * (over[n] - under[n])) for n in under}
        tried = {n: min(over[n], rounded_up(t, step_of(multiple_of, n))) for n, t in tried.items()}
        if measure(tried) <= budget:
            best, low = tried, fraction
        else:
            high = fraction
    return best
