"""How much of each layer goes, when what is given is a budget: least predicted error for it.

Backward elimination tells, for every unit and without data, what each further channel's loss adds
to the error at its readers. Channels go where that is least per multiply–accumulate (or parameter)
saved. One threshold on the price serves all units, found by bisection; planning cuts nothing.
An error inside a residual block counts by the share that the block has in its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from lbyl.channels import Axis
from lbyl.elimination import EchoCriterion, reach
from lbyl.exceptions import LbylError
from lbyl.record import Inputs
from lbyl.statistics.base import Statistics
from lbyl.surgery import tensors
from lbyl.trace import trace
from lbyl.unit import Graph, Producer
from lbyl.weights import unit_weights

SMALLEST_SHARE = 0.1  # of a unit's channels that always stays


@dataclass(frozen=True)
class Curve:
    """Predicted relative error of a unit at its readers, by how many channels are gone."""

    order: Tensor  # channels in the order they go
    error: Tensor  # (m,): error[k] with k channels gone, 0 … 1, never falling
    influence: float = 1.0  # the share that the readers' output has in what follows

    @property
    def price(self) -> Tensor:
        """(m − 1,): what each removal adds, made non-decreasing so that a threshold is a prefix."""
        noise = self.error / (1 - self.error).clamp(min=1e-3)  # noise to signal: no layer is wiped
        return self.influence * torch.cummax(noise.diff(), 0).values


def curves(
    model: nn.Module, example_inputs: Inputs, graph: Graph, statistics: Statistics
) -> dict[str, Curve]:
    """The error curve of every unit, by the criterion `echo`."""
    weights = unit_weights(graph, model)
    shares = influence(model, trace(model, example_inputs, streams=True))
    found = {}
    for unit in graph.units:
        order = EchoCriterion().order(weights[unit.name], statistics)
        seen = reach(weights[unit.name], statistics)
        total = 1.0
        if seen is not None:
            total = float((seen.weight * seen.covariance).sum().clamp(min=1e-30))
        costs = torch.tensor([0.0, *(cost for _, cost in order)], dtype=torch.float64)
        error = (costs.clamp(min=0).cumsum(0) / total).clamp(max=1.0)
        share = max((shares.get(c, 1.0) for c in unit.consumers), default=1.0)
        found[unit.name] = Curve(torch.tensor([j for j, _ in order]).long(), error, share)
    return found


def influence(model: nn.Module, graph: Graph) -> dict[str, float]:
    """Layer → share of its output in the variance of the residual stream it is added to.

    BatchNorm remembers the variance of each layer's output in γ². A layer inside a block has the
    share of the block's last layer. `graph` must have been traced with streams.
    """
    state = tensors(model)
    shares: dict[str, float] = {}
    for unit in graph.units:
        if unit.stream:
            power = 0.0
            for producer in unit.producers:
                own = _power(producer, state)
                power += own
                shares[producer.name] = own / power if own else 1.0
    for unit in reversed(graph.units):  # later layers first: inner ones look at what follows
        if not unit.stream:
            reader = max((shares.get(c, 1.0) for c in unit.consumers), default=1.0)
            shares |= {p.name: reader for p in unit.producers}
    return shares


def _power(producer: Producer, state: Mapping[str, Tensor]) -> float:
    """Variance of a layer's output summed over channels, 0 where no BatchNorm remembers it."""
    norm = producer.norm
    if norm is None or norm.weight is None:
        return 0.0
    return float(state[norm.weight].detach().double().square().sum())


class Sizes:
    """Sizes of all parameters as a function of how many channels of each unit stay."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.units = {unit.name: unit for unit in graph.units}
        self._owned: dict[Axis, dict[str, float]] = {}
        starts = torch.tensor([u.start for u in graph.units] or [0])
        for axis, channel in graph.axes.items():
            place = torch.searchsorted(starts, channel.clamp(min=0), right=True) - 1
            per_unit: dict[str, float] = {}
            for i in torch.unique(place[channel >= 0]).tolist():
                unit = graph.units[i]
                mine = int(((channel >= unit.start) & (channel < unit.range.stop)).sum())
                if mine:
                    per_unit[unit.name] = mine / unit.channels
            if per_unit:
                self._owned[axis] = per_unit

    def of(self, name: str, counts: Mapping[str, int]) -> int:
        """Elements of a parameter when `counts` channels of each unit stay."""
        total = 1.0
        for axis, size in enumerate(self.graph.shapes[name]):
            gone = sum(
                (self.units[u].channels - counts[u]) * each
                for u, each in self._owned.get((name, axis), {}).items()
            )
            total *= size - gone
        return round(total)

    def macs(self, counts: Mapping[str, int]) -> int:
        weights = {c.weight for c in self.graph.contractions}
        return self.graph.macs({name: self.of(name, counts) for name in weights})

    def parameters(self, counts: Mapping[str, int]) -> int:
        return sum(self.of(name, counts) for name in self.graph.shapes)


@dataclass(frozen=True)
class Budget:
    """What may be left of a network, given as exactly one of these."""

    macs: float | None = None
    params: float | None = None
    latency: float | None = None
    max_error: float | None = None

    @property
    def given(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def check(self, ratio: object = None) -> None:
        """One clear error for a budget that means nothing."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        if len(found) > 1 or (found and ratio is not None):
            names = [*found, *(["ratio"] if ratio is not None else [])]
            raise LbylError(f"give one of {', '.join(names)}, not several")
        for name, value in found.items():
            if not 0 < value <= 1:
                raise LbylError(f"{name} is {value}: it must be above 0 and at most 1")

    def counts(
        self,
        model: nn.Module,
        example_inputs: Inputs,
        graph: Graph,
        statistics: Statistics,
        round_to: int | None = None,
    ) -> dict[str, int]:
        """Unit → channels that stay."""
        found = curves(model, example_inputs, graph, statistics)
        if self.max_error is not None:
            limit = self.max_error
            return {n: _kept(c, c.error[1:], limit, round_to) for n, c in found.items()}
        sizes = Sizes(graph)
        measure = sizes.parameters if self.params is not None else sizes.macs
        full = {unit.name: unit.channels for unit in graph.units}
        prices = _prices(found, full, measure)

        def allocate(share: float) -> dict[str, int]:
            return _bisect(found, prices, measure, share * measure(full), round_to)

        if self.latency is not None:
            return _by_latency(model, example_inputs, graph, allocate, self.latency)
        return allocate(self.params if self.params is not None else self.macs or 1.0)


def _by_latency(
    model: nn.Module,
    example_inputs: Inputs,
    graph: Graph,
    allocate: Callable[[float], dict[str, int]],
    target: float,
) -> dict[str, int]:
    """The largest share of MACs whose measured time is at most `target` of the original's."""
    from lbyl.latency import compare
    from lbyl.surgery import cut, sliced, surviving_indices

    device = next(model.parameters()).device
    low, high, best = 0.0, 1.0, None
    for _ in range(6):
        share = (low + high) / 2
        try:
            counts = allocate(share)
        except LbylError:  # smaller than pruning can make it
            low = share
            continue
        kept = {name: torch.arange(count) for name, count in counts.items()}
        slim = cut(model, graph, sliced(model, surviving_indices(graph, kept)))
        timed = compare({"original": model, "slim": slim}, example_inputs, device)
        if timed["slim"].median <= target * timed["original"].median:
            low, best = share, counts
        else:
            high = share
    if best is None:
        raise LbylError(f"no pruned network takes {target:.0%} of the original's time here")
    return best


def _prices(
    found: Mapping[str, Curve], full: dict[str, int], measure: Callable[[Mapping[str, int]], int]
) -> dict[str, Tensor]:
    """Error added per element of cost saved, for every removal of every unit."""
    whole = measure(full)
    prices = {}
    for name, curve in found.items():
        saved = whole - measure({**full, name: full[name] - 1})
        prices[name] = curve.price / max(saved, 1)
    return prices


def _kept(curve: Curve, price: Tensor, limit: float, round_to: int | None) -> int:
    """Channels that stay when every removal priced under the limit is made."""
    channels = len(curve.error)
    least = max(1, int(SMALLEST_SHARE * channels))
    count = max(least, channels - int((price <= limit).sum()))
    if round_to:
        count = -(-count // round_to) * round_to
    return min(channels, count)


def _bisect(
    found: Mapping[str, Curve],
    prices: Mapping[str, Tensor],
    measure: Callable[[Mapping[str, int]], int],
    budget: float,
    round_to: int | None,
) -> dict[str, int]:
    """The lowest price limit at which the network fits the budget."""

    def counts(limit: float) -> dict[str, int]:
        return {n: _kept(c, prices[n], limit, round_to) for n, c in found.items()}

    every = torch.cat(list(prices.values())).clamp(min=0).sort().values
    low, high = -1, len(every) - 1
    if measure(counts(float(every[high]))) > budget:
        raise LbylError(
            "the budget cannot be met by pruning alone: even the smallest network allowed is "
            f"{measure(counts(float(every[high]))):,} against {budget:,.0f}"
        )
    while high - low > 1:
        middle = (low + high) // 2
        fits = measure(counts(float(every[middle]))) <= budget
        low, high = (low, middle) if fits else (middle, high)
    over = counts(float(every[low])) if low >= 0 else {n: len(c.error) for n, c in found.items()}
    return _between(over, counts(float(every[high])), measure, budget, round_to)


def _between(
    over: Mapping[str, int],
    under: Mapping[str, int],
    measure: Callable[[Mapping[str, int]], int],
    budget: float,
    round_to: int | None,
) -> dict[str, int]:
    """As close to the budget as a mixture of two neighbouring allocations comes.

    Removals of one price come in blocks; taking only part of a block spends the whole budget.
    """
    best, low, high = dict(under), 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        tried = {n: under[n] + int(middle * (over[n] - under[n])) for n in under}
        if round_to:
            tried = {n: min(over[n], -(-t // round_to) * round_to) for n, t in tried.items()}
        if measure(tried) <= budget:
            best, low = tried, middle
        else:
            high = middle
    return best
