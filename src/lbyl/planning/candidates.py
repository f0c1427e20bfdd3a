"""How much of each unit is pruned, chosen by what it does to the whole network.

Predicted errors know one layer at a time: after global pooling procedural images differ little, so
everything there looks redundant. Here several allocations of equal cost are tried, and the one
stays whose outputs diverge least from the original's. Allocations are *directions* (unit → fraction
of its channels that is pruned) scaled until they meet the budget, so that any two can be blended.

Nothing here cuts a network: what an allocation does is asked of a function that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lbyl.errors import LbylError
from lbyl.graph.patterns import names_attention
from lbyl.planning.budget import (
    Curve,
    bisect_prices,
    kinds,
    least_kept,
    made_uniform,
    prices,
    savings,
)
from lbyl.planning.ratio import Steps, step_of

Counts = Mapping[str, int]
"""Unit → channels that stay."""

Direction = Mapping[str, float]
"""Unit → fraction of its channels that is pruned, up to a factor common to all."""

Cost = Callable[[Counts], int]
Score = Callable[[Counts], float]
"""The divergence of the network with so many channels, restored in closed form."""
Scores = Callable[[Sequence[Counts]], Iterable[float]]
"""The same of several networks, one after the other."""

ALONE = 0.6  # units are cut one at a time as in a uniform network of this cost
BLENDS = {"predicted": (1.0,), "measured": (0.75, 1.0)}  # with the uniform one
DEAR = 4.0  # a unit is dear whose part of the harm is so many times its part of the saving,
SMALL = 0.1  # and all that are spared together save no more than this of the whole saving
HALVINGS = 7  # of the range of sizes, where one is looked for
LARGER, LARGER_BY = 3, 1 / 32  # so many larger sizes are tried, each by such a part of the cost
NEAR = 0.1  # of the time asked for: what is measured at last may be so far from it


@dataclass(frozen=True)
class Allocation:
    """How many channels of each unit stay, and how that was chosen."""

    counts: Counts
    name: str
    tried: Mapping[str, float] = field(default_factory=dict)  # name → divergence
    spared: tuple[str, ...] = ()  # units left whole though a ratio was asked for

    def __str__(self) -> str:
        spared = f", {', '.join(self.spared)} spared" if self.spared else ""
        many = f" of {len(self.tried)} trials" if len(self.tried) > 1 else ""
        return f"{self.name}{many}{spared}"


@dataclass(frozen=True)
class Sensitivity:
    """One unit cut alone: how far the outputs move, and the noise that predicts it."""

    divergence: float
    noise: float  # predicted noise to signal at its consumers


def pruned_fractions(counts: Counts, channels: Counts) -> dict[str, float]:
    """The direction of an allocation."""
    return {name: 1 - count / channels[name] for name, count in counts.items()}


def blended(one: Direction, other: Direction, weight: float) -> dict[str, float]:
    """A direction between two."""
    return {name: (1 - weight) * one[name] + weight * other[name] for name in one}


def fit(
    direction: Direction, channels: Counts, cost: Cost, budget: float, multiple_of: Steps
) -> dict[str, int] | None:
    """The counts where a direction, gone far enough, first meets the budget; None: nowhere."""
    # Asked for hundreds of times: what does not depend on the scale is looked up once.
    rows = [
        (size, direction.get(name, 0.0), least_kept(size), step_of(multiple_of, name) or 1)
        for name, size in channels.items()
    ]
    sizes, fractions, smallest, steps = np.array(rows, dtype=np.float64).reshape(-1, 4).T

    def counts(scale: float) -> dict[str, int]:
        left = np.maximum(np.floor(sizes * (1 - scale * fractions) + 1e-9), smallest)
        rounded = np.minimum(sizes, np.ceil(left / steps) * steps).astype(np.int64)
        return dict(zip(channels, rounded.tolist()))

    positive = [fraction for fraction in direction.values() if fraction > 0]
    if not positive:
        return dict(channels) if cost(channels) <= budget else None
    low, high = 0.0, 1 / min(positive)
    if cost(counts(high)) > budget:
        return None
    least, most = counts(high), counts(low)
    for _ in range(40):
        if least == most:
            break
        scale = (low + high) / 2
        tried = counts(scale)
        if cost(tried) <= budget:
            high, least = scale, tried
        else:
            low, most = scale, tried
    return least


@dataclass
class Allocator:
    """Allocations of one network: its error curves, what its channels cost, how it is judged."""

    curves: Mapping[str, Curve]
    channels: Counts
    cost: Cost
    whole: Scores  # of networks as they would come out
    alone: Scores  # less exactly and far quicker, of networks whose other units stay whole
    multiple_of: Steps = None
    progress: Callable[[str, int, int], None] | None = None
    measured: dict[str, Sensitivity] = field(default_factory=dict)  # filled when first needed
    uniform: bool = False  # units of one kind keep equally many channels

    def choose(self, fraction: float) -> Allocation:
        """Of all candidates that leave this fraction of the cost the one that diverges least."""
        candidates = self.candidates(fraction)
        tried: dict[str, float] = {}
        for name, score in zip(candidates, self.whole(list(candidates.values()))):
            tried[name] = score
            self._tell("trying allocations", len(tried), len(candidates))
        best = min(tried, key=lambda name: tried[name])
        return Allocation(candidates[best], best, tried)

    def choose_by_latency(
        self, target: float, time_fraction: Callable[[Counts], float]
    ) -> Allocation:
        """The largest network whose measured time is at most `target` of the original's.

        Which allocation is best is found out at that fraction of the cost; its size by bisection.
        """
        best = self.choose(max(target, self._least_fraction()))
        size = self._bisect(best.name, lambda c: time_fraction(c) <= target, largest=True)
        if size is None:
            raise LbylError(f"no pruned network takes {target:.0%} of the original's time here")
        best = replace(best, counts=self._named(best.name, size) or best.counts)
        check_time(target, time_fraction(best.counts))
        return best

    def choose_by_forecast(
        self, target: float, low: Callable[[Counts], float]
    ) -> Iterator[Allocation]:
        """The smallest network that keeps `target` of the accuracy at least, then larger ones.

        Which allocation is best is found out at a size in between; the size itself by bisection.
        """
        best = self.choose(max(ALONE, self._least_fraction()))

        def fits(counts: Counts) -> bool:
            return counts != self.channels and low(counts) >= target

        smallest = self._bisect(best.name, fits, largest=False)
        if smallest is None:
            raise LbylError(
                f"no pruned network can be promised to keep {target:.1%} of the accuracy: ask for "
                "less, or give 128 or more inputs of your own (data=)"
            )
        size, tried, last = smallest, 0, None
        while size < 1 and tried <= LARGER:
            counts = self._named(best.name, size)
            if counts is not None and counts not in (last, self.channels):
                yield replace(best, counts=counts)
                tried, last = tried + 1, counts
            size += LARGER_BY

    def _bisect(self, name: str, fits: Callable[[Counts], bool], *, largest: bool) -> float | None:
        """Of an allocation at several sizes the largest, or the smallest, that fits."""
        low, high, fitting = 0.0, 1.0, None
        for step in range(HALVINGS):
            fraction = (low + high) / 2
            counts = self._named(name, fraction)
            fit = counts is not None and fits(counts)
            fitting = fraction if fit else fitting
            # Sizes that pruning cannot reach lie below all others.
            above = counts is None or fit == largest
            low, high = (fraction, high) if above else (low, fraction)
            self._tell("trying sizes", step + 1, HALVINGS)
        return fitting

    def _named(self, name: str, fraction: float) -> dict[str, int] | None:
        if not self._least_fraction() <= fraction < 1:
            return None
        candidates = self.candidates(fraction)
        return candidates.get(name, candidates["uniform"])

    def _least_fraction(self) -> float:
        """The fraction of the cost that the smallest network allowed has."""
        least = {n: least_kept(c) for n, c in self.channels.items()}
        return self.cost(least) / max(self.cost(self.channels), 1)

    def candidates(self, fraction: float) -> dict[str, dict[str, int]]:
        """Different allocations within the budget by name: uniform, and blends with priced ones."""
        budget = fraction * self.cost(self.channels)
        even = self._fit(dict.fromkeys(self.channels, 1.0), budget)
        if even is None:
            raise LbylError(
                "the budget cannot be met by pruning alone: even the smallest network allowed has "
                f"{self._least_fraction():.1%} of the cost, {fraction:.1%} were asked for"
            )
        made = {"uniform": even}
        base = pruned_fractions(even, self.channels)
        for name, curves in (("predicted", self.curves), ("measured", self.weighted_curves)):
            end = pruned_fractions(self._priced(curves, budget), self.channels)
            end = made_uniform(end, kinds(self.channels)) if self.uniform else end
            for weight in BLENDS[name]:
                counts = self._fit(blended(base, end, weight), budget)
                if counts is not None and counts not in made.values():
                    made[f"{name} {weight:g}"] = counts
        return made | self._by_kind(budget)

    def _by_kind(self, budget: float) -> dict[str, dict[str, int]]:
        """Uniform allocations that leave heads and values of attention whole, or all of it."""
        attention = {n: n.rpartition(":")[2] for n in self.channels if names_attention(n)}
        made = {}
        heads = ("heads", "queries", "v")
        for name, spared in (("channels", (*heads, "qk")), ("channels+qk", heads)):
            some = [n for n in self.channels if attention.get(n) not in spared]
            counts = self._fit({n: float(n in some) for n in self.channels}, budget)
            if attention and len(some) < len(self.channels) and counts is not None:
                made[f"uniform {name}"] = counts
        return made

    @cached_property
    def weighted_curves(self) -> dict[str, Curve]:
        """The curves with each unit's error weighted by what it does to the outputs."""
        measured = self.sensitivities()
        weights = {n: s.divergence / s.noise for n, s in measured.items() if s.noise > 1e-9}
        typical = sorted(weights.values())[len(weights) // 2] if weights else 1.0
        return {n: Curve(c.error, weights.get(n, typical)) for n, c in self.curves.items()}

    def sensitivities(self) -> dict[str, Sensitivity]:
        """Every unit cut alone, as much as in a uniform network of a given cost."""
        if self.measured:
            return self.measured
        even = self._fit(dict.fromkeys(self.channels, 1.0), ALONE * self.cost(self.channels))
        counts = even or {n: max(1, round(ALONE * c)) for n, c in self.channels.items()}
        less = {name: count for name, count in counts.items() if count < self.channels[name]}
        self._tell("cutting units one at a time", 0, len(less))
        scores = self.alone([{name: count} for name, count in less.items()])
        for (name, count), divergence in zip(less.items(), scores):
            error = float(self.curves[name].error[self.channels[name] - count])
            self.measured[name] = Sensitivity(divergence, error / max(1 - error, 1e-3))
        self._tell("cutting units one at a time", len(less), len(less))
        return self.measured

    def _fit(self, direction: Direction, budget: float) -> dict[str, int] | None:
        return fit(direction, self.channels, self.cost, budget, self.multiple_of)

    def _priced(self, curves: Mapping[str, Curve], budget: float) -> dict[str, int]:
        priced = prices(curves, self._savings)
        return bisect_prices(curves, priced, self.cost, budget, self.multiple_of)

    @cached_property
    def _savings(self) -> dict[str, int]:
        return savings(self.channels, self.cost)

    def _tell(self, stage: str, step: int, steps: int) -> None:
        if self.progress:
            self.progress(stage, step, steps)


def check_time(asked: float, measured: float) -> None:
    """One clear error where the last measurement is not what was asked for."""
    if abs(measured - asked) > NEAR * asked:
        raise LbylError(
            f"{asked:.1%} of the original's time were asked for, and the last measurement says "
            f"{measured:.1%}: the machine is busy, or this network's time does not follow its "
            "widths; measure on a quiet machine, or give macs= instead"
        )


def spare(
    counts: Counts, channels: Counts, harm: Mapping[str, float], cost: Cost, whole: Score
) -> Allocation:
    """Counts of a plain ratio with those units left whole that cost much and save little.

    `harm` is the predicted noise of each unit in the whole network. A unit is dear whose part of
    the harm is `DEAR` times its part of the saving; it is spared only if the whole network confirms
    it: the divergence must fall by as many times the part of the saving that is given up.
    """
    suspects = _dear(counts, channels, harm, cost)
    if not suspects:
        return Allocation(counts, "uniform")
    left, spared, now = dict(counts), [], whole(counts)
    tried = {"uniform": now}
    for name in suspects:
        trial = {**left, name: channels[name]}
        saving = cost(channels) - cost(left)
        given_up = 1 - (cost(channels) - cost(trial)) / max(saving, 1)
        then = whole(trial)
        tried[f"without {name}"] = then
        if now > 0 and 1 - then / now >= DEAR * given_up:
            left, now = trial, then
            spared.append(name)
    return Allocation(left, "uniform", tried, tuple(spared))


def _dear(counts: Counts, channels: Counts, harm: Mapping[str, float], cost: Cost) -> list[str]:
    """Units that cost much and save little: the dearest first, as long as little is given up."""
    full = cost(channels)
    saving = {n: full - cost({**channels, n: c}) for n, c in counts.items() if c < channels[n]}
    all_harm, all_saving = sum(harm.get(n, 0.0) for n in saving), sum(saving.values())
    if not all_harm or not all_saving:
        return []
    price = {
        n: (harm.get(n, 0.0) / all_harm) / max(s / all_saving, 1e-9) for n, s in saving.items()
    }
    dear: list[str] = []
    given_up = 0.0
    for name in sorted(price, key=lambda n: -price[n]):
        given_up += saving[name] / all_saving
        if price[name] < DEAR or given_up > SMALL:
            break
        dear.append(name)
    return dear
