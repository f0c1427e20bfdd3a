"""Choosing between allocations and criteria by what they do to the whole network.

Candidates are cut, restored in closed form and compared with the original on fresh inputs;
statistics are collected once, so that only solves repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.unit import Axis, Graph
from lbyl.inputs.batches import FreshInputs, InputBatches
from lbyl.inputs.user import halves
from lbyl.planning.budget import Budget, Sizes, curves, unit_influence, within_error
from lbyl.planning.candidates import Allocation, Allocator, Counts, Scores, Sensitivity, spare
from lbyl.planning.criteria import Criterion
from lbyl.planning.plan import Plan
from lbyl.planning.ratio import counts as ratio_counts
from lbyl.planning.ratio import steps_of
from lbyl.planning.task import Chosen, Task, make_plan
from lbyl.restoring.recalibrate import SecondPass, Seen, divergence_of, move_running_stats
from lbyl.restoring.rewrite import Restoration, restore, silencing, solve_ahead
from lbyl.restoring.solving import Solver
from lbyl.runtime.format import counted
from lbyl.runtime.notes import Note, noting
from lbyl.runtime.processes import agreed
from lbyl.runtime.run import Inputs, Progress, device_of
from lbyl.runtime.session import threads_for
from lbyl.scoring.compare import Divergence
from lbyl.scoring.forecast import CALIBRATIONS, Calibration, Forecast, Forecaster
from lbyl.statistics.moments import Statistics
from lbyl.surgery.indices import kept_indices

WHOLE, ALONE = 4, 16  # parts of a collection that networks are compared on: all of it cut, one unit

HELD = 1 << 28  # numbers in the weights of networks that are compared at once

TIGHTENED = 5  # times a budget is, until the plan that comes of it is within what was asked

CLEARLY = 0.9  # a divergence so much smaller is no chance of the inputs

TimeFraction = Callable[[Counts], float]
"""Measures what fraction of the original's time a network with these channel counts takes."""


@dataclass
class Judges:
    """The inputs that networks are compared on, and what the original makes of them."""

    model: nn.Module
    graph: Graph
    fresh: FreshInputs
    held: InputBatches | None = None  # the user's own that nothing was fitted on, instead of fresh
    normalising: InputBatches | None = None  # the user's own to recalibrate on, instead of fresh
    recalibrating: bool = True  # whether there is anything to recalibrate on
    # What each unit cut alone does, by task: the same for every size of a budget.
    measured: dict[str, dict[str, Sensitivity]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Divergence:
        """Judges a network that was cut everywhere."""
        ways = (False, True) if self.graph.norms and self.held is None else (False,)
        return Divergence(self.model, self._inputs(WHOLE), ways, self.vocabulary)

    def divergence(self, slim: nn.Module, seen: Seen | None) -> float:
        """How far a network that was cut everywhere diverges.

        What was `seen` of it in the second pass tells the same of other inputs as a further run
        with BatchNorm normalising by the batch, unless it was fitted to those of the pass.
        """
        known = None
        fresh = self.normalising is None
        if seen is not None and fresh and self.second_pass.inputs.batch_statistics:
            known = divergence_of(self.second_pass.original, seen)
        return self.whole(slim, known)

    @property
    def vocabulary(self) -> int | None:
        return None if self.fresh.author is None else self.fresh.author.vocabulary

    @cached_property
    def alone(self) -> Divergence:
        """Judges a network of which one unit was cut: quicker."""
        return Divergence(self.model, self._inputs(ALONE), (False,), self.vocabulary)

    def _inputs(self, part: int) -> Sequence[Inputs]:
        if self.held is None:
            return self.fresh.judging(part)
        batches = list(self.held.batches)
        return batches[: max(1, len(batches) * WHOLE // part)]

    @cached_property
    def calibration(self) -> Calibration:
        """What equal answers mean for accuracy, on the inputs that networks are compared on."""
        if self.held is not None:
            return CALIBRATIONS["own"]
        return CALIBRATIONS["folded" if self.graph.forgot else "fresh"]

    @cached_property
    def forecaster(self) -> Forecaster:
        """Tells how much accuracy a network keeps: on own inputs, else on fresh ones."""
        if self.held is not None:
            return self._forecaster(list(self.held.batches))
        return self._forecaster(self.fresh.forecasting())

    @cached_property
    def choosing(self) -> Forecaster:
        """The same on inputs that choices are made by: half of the user's own, or others drawn."""
        if self.held is not None:
            return self._forecaster(halves(self.held, self._whole_batches)[0])
        return self._forecaster(self.fresh.judging(WHOLE))

    def checking(self, kept: float, attempt: int) -> Forecaster:
        """The same on inputs that no choice has seen, as many as pay where `kept` is promised.

        Fresh ones are others at every attempt. Of the user's own there is one other half.
        """
        if self.held is not None:
            return self._forecaster(halves(self.held, self._whole_batches)[1])
        count = self.calibration.inputs_for(kept)
        return self._forecaster(self.fresh.forecasting(attempt, count))

    @property
    def _whole_batches(self) -> bool:
        return self.fresh.fixed_batch is not None

    def _forecaster(self, batches: Sequence[Inputs]) -> Forecaster:
        source = "fresh" if self.held is None else "own"
        return Forecaster(self.model, batches, source, self.calibration)

    @cached_property
    def second_pass(self) -> SecondPass:
        """What networks show that run once more, to recalibrate them."""
        return SecondPass(self.model, self.normalising or self.fresh.second_pass)


@dataclass(frozen=True)
class Trial:
    """A network cut as planned and restored, and how the plan was chosen."""

    plan: Plan
    restored: Restoration
    recalibrated: int = 0  # BatchNorms
    seen: Seen | None = None  # of the slim network in the second pass, where it ran
    allocation: Allocation | None = None  # None: there was nothing to choose
    fallbacks: tuple[Note, ...] = ()
    forecast: Forecast | None = None  # where the size was found by it, and checked


def preferred(scores: Sequence[float]) -> int:
    """Which of several networks to keep: the last, unless one diverges clearly less.

    Criteria come in the order of what they know. Between two that diverge nearly alike the inputs
    that were drawn decide, and what knows more is better more often.
    """
    least = min(scores)
    return len(scores) - 1 if not least < CLEARLY * scores[-1] else list(scores).index(least)


@dataclass
class Chooser:
    """Makes the plan that a task asks for, trying several where that is open."""

    model: nn.Module
    graph: Graph
    statistics: Statistics | None
    task: Task
    judges: Judges
    time_fraction: TimeFraction
    progress: Progress | None = None
    _trials: dict[str, Trial] = field(default_factory=dict, repr=False)
    _scores: dict[str, float] = field(default_factory=dict, repr=False)
    _seen: dict[str, Seen] = field(default_factory=dict, repr=False)  # of whole networks
    _chosen: dict[int, Chosen] = field(default_factory=dict, repr=False)

    def choose(self) -> Trial:
        """The network that the task asks for; of several one that diverges clearly less."""
        with threads_for(device_of(self.model)):
            return self._choose()

    def _choose(self) -> Trial:
        task = self.task
        if isinstance(task.amount, Plan):
            task.amount.check(self.graph)
            return self.trial(task.amount)
        if not isinstance(task.amount, Budget):
            return self._best_of(None)
        if task.amount.keep is not None:
            return self._keeping(task.amount)
        return self._best_of(self._within(task.amount, task.criteria[-1]))

    def _best_of(self, allocation: Allocation | None) -> Trial:
        """By the criterion whose network diverges clearly less; widths are those of the last."""
        task = self.task
        if len(task.criteria) == 1:
            return self._by(task.criteria[0], allocation)
        scores, makers = zip(*(self._scored(each, allocation) for each in task.criteria))
        best = makers[preferred(scores)]()
        names = [(criterion or task.method).name for criterion in task.criteria]
        tried = {f"criterion {name}": score for name, score in zip(names, scores)}
        kept = {name: len(indices) for name, indices in best.plan.kept.items()}
        allocation = best.allocation or Allocation(kept, "given ratios")
        return replace(best, allocation=replace(allocation, tried={**tried, **allocation.tried}))

    def _scored(
        self, criterion: Criterion | None, allocation: Allocation | None
    ) -> tuple[float, Callable[[], Trial]]:
        """How far the network by a criterion diverges, and what makes it."""
        if allocation is not None and not self._cuts_first:
            score = self._score(criterion)(allocation.counts)
            return score, partial(self._by, criterion, allocation)
        trial = self._by(criterion, allocation)
        return self._judged(trial), lambda: trial

    def trial(self, plan: Plan, allocation: Allocation | None = None) -> Trial:
        """Cut and restore as planned, and run both networks once more where that is asked for."""
        with noting() as notes:
            restored = self._restored(plan)
            seen, recalibrated = None, 0
            if self._recalibrates(plan):
                indices = kept_indices(self.graph, plan.kept)
                known = self._seen.get(_key(plan))
                seen, recalibrated = self._recalibrate(restored.model, indices, known)
        return Trial(plan, restored, recalibrated, seen, allocation, tuple(notes))

    @cached_property
    def solver(self) -> Solver:
        """Remembers solutions where there are several plans to try."""
        several = isinstance(self.task.amount, Budget) or len(self.task.criteria) > 1
        return Solver(self.model, self.graph, self.task.method, self.statistics, several)

    def _restored(self, plan: Plan) -> Restoration:
        method = self.task.method
        return restore(
            self.model, self.graph, plan, method, self.statistics, self.progress, self.solver
        )

    def _recalibrate(
        self, slim: nn.Module, indices: Mapping[Axis, Tensor], known: Seen | None = None
    ) -> tuple[Seen, int]:
        """What a second run of a network shows, or is known to, and how many BatchNorms moved."""
        second_pass = self.judges.second_pass
        seen = second_pass.run(slim) if known is None else known
        before, after = second_pass.original.moments, seen.moments
        return seen, move_running_stats(self.model, slim, self.graph, indices, before, after)

    def _recalibrates(self, plan: Plan) -> bool:
        """Whether a second run of both networks is asked for."""
        method = self.task.method
        # What follows from the weights is left as it is: nothing is run for it.
        measured = self.statistics is not None and self.statistics.source != "analytic"
        measured = measured and self.judges.recalibrating
        asked = method.correction == "recalibrate" and not getattr(method, "sequential", False)
        return asked and measured and bool(self.graph.norms) and bool(plan.pruned)

    def _by(self, criterion: Criterion | None, allocation: Allocation | None) -> Trial:
        """The network with channels chosen by this criterion (None: by the method)."""
        amount = self.task.amount
        if allocation is not None:
            return replace(self._trial_of(allocation.counts, criterion), allocation=allocation)
        assert not isinstance(amount, (Budget, Plan))
        counts = ratio_counts(self.graph, amount, self.task.multiple_of)
        trial = self._trial_of(counts, criterion)
        if isinstance(amount, Mapping) or not self.task.method.tries or self.statistics is None:
            return trial  # exactly as asked for
        return self._sparing(trial, counts, criterion)

    def _plan(self, counts: Counts, criterion: Criterion | None) -> Plan:
        chosen = self._chosen.setdefault(id(criterion), {})
        return make_plan(
            self.model,
            self.graph,
            counts,
            self.task.method,
            criterion,
            self.statistics,
            chosen,
            self.solver.state,
        )

    def _score(self, criterion: Criterion | None) -> Callable[[Counts], float]:
        def score(counts: Counts) -> float:
            plan = self._plan(counts, criterion)
            key = _key(plan)
            if not self._cuts_first and key not in self._trials and key not in self._scores:
                told = self.whole_score(plan)
                if told is not None:
                    self._scores[key] = agreed(told)
            if key in self._scores:
                return self._scores[key]
            return self._judged(self._trial_of(counts, criterion))

        return score

    @cached_property
    def _cuts_first(self) -> bool:
        """Whether candidates are cut before they are judged.

        A processor computes less of a cut network. A device has to look for kernels for every
        width that it has not met yet, which takes longer than to run the whole one.
        """
        return device_of(self.model).type == "cpu"

    def whole_score(self, plan: Plan) -> float | None:
        """The divergence of a network as it would come out, of the whole one with values changed.

        None where only a cut network can tell.
        """
        (values,) = silencing(self.graph, [plan], self.solver)
        if values is None:
            return None
        state = self.solver.state
        moved = {name: state[name] for n in self.graph.norms for name in (n.mean, n.var)}
        with self.judges.alone.scratch.holding({**moved, **values}) as silenced:
            seen = None
            if self._recalibrates(plan):
                seen, _ = self._recalibrate(silenced, {})
                self._seen[_key(plan)] = seen
            return self.judges.divergence(silenced, seen)

    def _trial_of(self, counts: Counts, criterion: Criterion | None) -> Trial:
        """The network with these widths; the best so far is not made again."""
        plan = self._plan(counts, criterion)
        key = _key(plan)
        if key not in self._trials:
            self._trials[key] = self.trial(plan)
        return self._trials[key]

    def _judged(self, trial: Trial) -> float:
        """How far a trial diverges; of all that were judged only the best is kept."""
        key = _key(trial.plan)
        if key not in self._scores:
            self._scores[key] = agreed(self.judges.divergence(trial.restored.model, trial.seen))
            best = min(self._scores, key=self._scores.__getitem__)
            self._trials = {k: t for k, t in self._trials.items() if k == best}
        return self._scores[key]

    def _scores_of(self, criterion: Criterion | None) -> Scores:
        """The same of several networks, whose consumers a device solves in one go."""

        def scores(several: Sequence[Counts]) -> Iterator[float]:
            if not self._cuts_first:
                plans = [self._plan(counts, criterion) for counts in several]
                solve_ahead(self.graph, plans, self.solver)
            return map(self._score(criterion), several)

        return scores

    def _roughly(self, criterion: Criterion | None) -> Scores:
        """The same, roughly."""

        def scores(several: Sequence[Counts]) -> list[float]:
            return self.rough_scores(self._plan(counts, criterion) for counts in several)

        return scores

    def rough_scores(self, plans: Iterable[Plan]) -> list[float]:
        """How far networks diverge, on fewer inputs and without a second pass.

        They run side by side where the whole network can stand for the cut ones.
        """
        found: list[float] = []

        for some in self._held_at_once(plans):
            values = silencing(self.graph, some, self.solver)
            variants = [own for own in values if own is not None]
            told = iter(self.judges.alone.of_variants(variants) or map(self._silenced, variants))
            for plan, own in zip(some, values):
                found.append(agreed(self._cut_score(plan) if own is None else next(told)))
        return found

    def _held_at_once(self, plans: Iterable[Plan]) -> Iterator[list[Plan]]:
        """Plans in groups whose new weights can be held at once."""
        some: list[Plan] = []
        size = 0
        for plan in plans:
            some.append(plan)
            changed = {c for n in plan.pruned for c in self.graph[n].consumers}
            weights = [self.graph.shapes[self.graph.consumers[c].weight] for c in changed]
            size += sum(math.prod(shape) for shape in weights)
            if size > HELD:
                yield some
                some, size = [], 0
        if some:
            yield some

    def _silenced(self, values: Mapping[str, Tensor]) -> float:
        with self.judges.alone.scratch.holding(values) as silenced:
            return self.judges.alone(silenced)

    def _cut_score(self, plan: Plan) -> float:
        return self.judges.alone(self._restored(plan).model)

    def _within(self, budget: Budget, criterion: Criterion | None) -> Allocation:
        """The best allocation within a budget."""
        if budget.max_error is not None:
            if budget.uniform:
                raise LbylError("uniform widths have no max_error: give macs= or params= instead")
            assert self.statistics is not None
            by_unit = curves(self.model, self.graph, self.statistics)
            multiple_of = steps_of(self.graph, self.task.multiple_of)
            return Allocation(within_error(by_unit, budget.max_error, multiple_of), "max_error")
        allocator, sizes = self._allocator(budget, criterion)
        if budget.latency is not None:
            return allocator.choose_by_latency(budget.latency, self.time_fraction)
        if budget.params is not None:
            return self._met(allocator, "parameters", budget.params, sizes, criterion)
        return self._met(allocator, "macs", budget.macs or 1.0, sizes, criterion)

    def _allocator(self, budget: Budget, criterion: Criterion | None) -> tuple[Allocator, Sizes]:
        """What shares out a budget over units, and what that costs."""
        assert self.statistics is not None
        by_unit = curves(self.model, self.graph, self.statistics)
        multiple_of = steps_of(self.graph, self.task.multiple_of)
        sizes = Sizes(self.graph, self.model, self.solver.bare(self.graph.consumers.values()))
        by = None if criterion is None else criterion.to_dict()
        key = f"{self.task.method.to_dict()} {by} {multiple_of} {budget.params is not None}"
        allocator = Allocator(
            by_unit,
            {unit.name: unit.channels for unit in self.graph.units},
            sizes.parameters if budget.params is not None else sizes.macs,
            self._scores_of(criterion),
            self._roughly(criterion),
            multiple_of,
            self.progress,
            self.judges.measured.setdefault(key, {}),
            budget.uniform,
        )
        return allocator, sizes

    def _met(
        self,
        allocator: Allocator,
        what: str,
        fraction: float,
        sizes: Sizes,
        criterion: Criterion | None,
    ) -> Allocation:
        """The best allocation whose plan meets the budget to the last element.

        Plans may keep more than an allocation says, as where a layer would be left without inputs.
        """
        most, asked = fraction * allocator.cost(allocator.channels), fraction
        for _ in range(TIGHTENED):
            allocation = allocator.choose(asked)
            cost = sizes.of_plan(self._plan(allocation.counts, criterion).kept, what)
            if cost <= most:
                return allocation
            asked *= most / cost
        raise LbylError(
            f"the budget of {fraction:.1%} of the {what} cannot be met: the closest network has "
            f"{cost / allocator.cost(allocator.channels):.1%}; ask for more, or prune more layers "
            "(residual=True, include=)"
        )

    def _keeping(self, budget: Budget) -> Trial:
        """The smallest network that keeps so much at least, by inputs that no choice has seen.

        Its size is found on others. If it misses, the next larger sizes are compared, each on
        inputs of its own.
        """
        asked, most = budget.keep or 0.0, self.judges.calibration.most
        if asked > most:
            raise LbylError(
                f"keep={asked} cannot be promised of any pruned network: without labels the most "
                f"is {most:.1%}; ask for less, or give macs=, params= or latency="
            )
        criterion = self.task.criteria[-1]
        allocator, _ = self._allocator(budget, criterion)
        sizes, low, attempt = allocator.choose_by_forecast(asked, self._at_least(criterion)), 0.0, 0
        for attempt, allocation in enumerate(sizes):
            trial = self._best_of(allocation)
            told = self.judges.checking(asked, attempt)(trial.restored.model)
            low = told.low or 0.0
            if low >= asked:
                return replace(trial, forecast=told)
        raise LbylError(
            f"no pruned network can be promised to keep {asked:.1%} of the accuracy: the last of "
            f"{counted(attempt + 1, 'size')} keeps at least {low:.1%} by inputs that no choice has "
            "seen; ask for less, or give 128 or more inputs of your own (data=)"
        )

    def _at_least(self, criterion: Criterion | None) -> Callable[[Counts], float]:
        """The fraction of the accuracy that a network with these widths keeps at least."""

        def low(counts: Counts) -> float:
            trial = self.trial(self._plan(counts, criterion))
            told = self.judges.choosing(trial.restored.model)
            if told.one_answer:
                raise LbylError(
                    "keep= is a fraction of accuracy, and this network answers alike all inputs "
                    "that it could be judged on: give macs=, params= or latency=, or data="
                )
            if told.low is None:
                raise LbylError(
                    "keep= is a fraction of accuracy, and this network's outputs are not one "
                    "vector of scores an example: give macs=, params= or latency= instead"
                )
            return told.low

        return low

    def _sparing(self, trial: Trial, counts: Counts, criterion: Criterion | None) -> Trial:
        """A plain ratio less the units that cost much and save little."""
        fractions = unit_influence(self.model, self.graph)
        harm = {}
        for unit in self.graph.units:
            error = trial.restored.error_of(unit)
            if error is not None:
                harm[unit.name] = fractions[unit.name] * error / max(1 - error, 1e-3)
        channels = {unit.name: unit.channels for unit in self.graph.units}
        macs = Sizes(self.graph).macs
        allocation = spare(counts, channels, harm, macs, self._score(criterion))
        if not allocation.spared:
            return replace(trial, allocation=allocation if allocation.tried else None)
        return replace(self._trial_of(allocation.counts, criterion), allocation=allocation)


def _key(plan: Plan) -> str:
    """What tells the plans of one task apart: who chose, and how many of each unit."""
    return f"{plan.criterion} {[len(kept) for kept in plan.kept.values()]}"
