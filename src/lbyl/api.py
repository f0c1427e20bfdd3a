"""The way from a model to a smaller one: prepare, plan, restore, refine.

This is the only file that knows all rooms. `Prepared` holds what many questions to one network
share: its graph, its statistics by source, inputs it has not seen.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError, LostWarning
from lbyl.graph.patterns import listed, names_attention
from lbyl.graph.unit import Axis, Graph, Unit
from lbyl.inputs.batches import FreshInputs, InputBatches, inverted
from lbyl.inputs.user import OwnInputs, own_batches
from lbyl.inputs.user import check_runs as check_own_runs
from lbyl.latency import compare
from lbyl.methods import registry as methods_registry
from lbyl.methods.base import Method
from lbyl.planning.budget import Budget, Sizes, check_budget
from lbyl.planning.criteria import Criterion, first_of_blocks
from lbyl.planning.plan import Plan
from lbyl.planning.ratio import check_ratio, steps_of
from lbyl.planning.task import Amount, Task
from lbyl.refining.distil import Refinement, Steps, check_steps, own_inputs, rounds_of
from lbyl.refining.distil import refine as refine_in_place
from lbyl.restoring.rewrite import Restoration
from lbyl.restoring.sequential import fit_sequentially
from lbyl.result import (
    Corrections,
    Estimate,
    EstimatePoint,
    Result,
    Row,
    Size,
)
from lbyl.runtime.format import first_line, percent
from lbyl.runtime.garbage import young_objects_only
from lbyl.runtime.guest import Guest
from lbyl.runtime.heap import memory_kept
from lbyl.runtime.notes import Note, note, noting
from lbyl.runtime.progress import callback
from lbyl.runtime.run import Examples, Inputs, Progress, device_of
from lbyl.scoring.choose import Chooser, Judges, Trial
from lbyl.scoring.forecast import Forecast
from lbyl.statistics.analytic import analytic_statistics
from lbyl.statistics.collect import (
    check_complete,
    check_statistics,
    collect,
    speak_for_themselves,
)
from lbyl.statistics.moments import Statistics
from lbyl.surgery.cut import copy_model, cut_for_trial
from lbyl.surgery.indices import complete, kept_indices
from lbyl.surgery.modules.experts import join_experts, split_experts
from lbyl.tracing.attributes import follow_widths
from lbyl.tracing.dry_run import COMPUTED_WITH
from lbyl.tracing.group import without
from lbyl.tracing.trace import EXCLUDED, NOT_INCLUDED, Patterns, check_model, guest_and_graph
from lbyl.tracing.values import Exactness, check_runs

UNREACHED = "the example inputs do not reach it, and it keeps its size"

SOURCES = ("procedural", "inversion", "analytic")

Data = str | int | Tensor | Iterable[Any] | Statistics
"""What statistics come from: a word of `SOURCES`, a number of procedural images, a user's own
unlabelled inputs (a tensor or batches), or statistics collected before."""


@young_objects_only()
@memory_kept()
def compress(
    model: nn.Module,
    example_inputs: Inputs,
    ratio: Amount | None = None,
    *,
    criterion: str | Criterion | None = None,
    method: str | Method = "echo",
    data: Data | None = None,
    include: Patterns = "*",
    exclude: Patterns = (),
    residual: bool = False,
    multiple_of: int | None = None,
    refine: Steps = 0,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Result:
    """Prune a fraction of the channels of `model` and restore what they carried.

    The model given is never changed. `example_inputs` are what it is called with: a tensor, a
    tuple of arguments or a dict of keyword arguments; an iterator of several such, of one batch
    size, where it has paths that one call does not reach (`iter([(x, "a"), (x, "b")])`).

    `ratio` says how much is pruned: a fraction of every unit's channels (0.3 unless given),
    patterns of layer names with a fraction each, a `Budget`, or a `Plan`. A single fraction spares
    units that cost much and save little, and the result says which; patterns are taken literally.

    `criterion` chooses the channels, `method` says what the kept ones take over. Without a
    criterion `echo` tries "l2" and "echo" and keeps the second unless the first diverges clearly
    less from the original on fresh inputs; all other methods go by "l2".

    `data` is what the network is run on: procedural images unless given, "inversion", a number of
    procedural images, your own unlabelled inputs (a tensor, or an iterable of batches), or
    `Statistics`. Few inputs of your own are blended with data-free ones; of 128 and more a quarter
    is held out, and every choice and the forecast go by those. `include` and `exclude` are
    patterns of layer names, `residual` also prunes channels that additions tie across layers,
    `multiple_of` rounds kept counts up.

    `refine` is a number of gradient steps after the closed form in which kept filters change too,
    on the same kind of inputs: slower than everything else together, and better. "auto" goes on
    until inputs that no step has seen stop improving, 1,500 steps at most.
    """
    check_steps(refine)
    check_data(data)
    task = Task.of(ratio, criterion, method, multiple_of)
    check_data_used(data, task, refine)
    prepared = prepare(
        model,
        example_inputs,
        include=[*listed(include), *attention_patterns(ratio)],
        exclude=exclude,
        residual=residual,
        data=data,
        seed=seed,
        progress=progress,
    )
    return prepared.compress(
        ratio, criterion=criterion, method=method, multiple_of=multiple_of, refine=refine
    )


def attention_patterns(ratio: Amount | None) -> list[str]:
    """Patterns of units of attention among the ratios given, or in a plan: those are asked for."""
    if isinstance(ratio, Plan):
        return [name for name in ratio.kept if names_attention(name)]
    return [p for p in ratio if names_attention(p)] if isinstance(ratio, Mapping) else []


def prepare(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    include: Patterns = "*",
    exclude: Patterns = (),
    residual: bool = False,
    data: Data | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Prepared:
    """Trace `model` once, for as many questions as there are; see `compress` for the arguments."""
    check_data(data)
    example_inputs = Examples.of(example_inputs)
    start = time.perf_counter()
    guest, graph = guest_and_graph(
        model, example_inputs, include=include, exclude=exclude, residual=residual
    )
    seconds = {"trace": time.perf_counter() - start}
    repeatable, told = _repeatable(data), callback(progress)
    return Prepared(guest.model, example_inputs, graph, repeatable, seed, told, seconds, guest)


Verb = TypeVar("Verb", bound=Callable[..., Any])


def _at_work(verb: Verb) -> Verb:
    """A method of `Prepared` in which the network may run."""

    @wraps(verb)
    def at_work(self: Prepared, *args: Any, **kwargs: Any) -> Any:
        with self.at_work():
            return verb(self, *args, **kwargs)

    return at_work  # type: ignore[return-value]


@dataclass
class Prepared:
    """A traced network: statistics are collected when first needed and serve everything."""

    model: nn.Module = field(repr=False)
    example_inputs: Inputs = field(repr=False)
    graph: Graph
    data: Data | None = field(default=None, repr=False)
    seed: int = 0
    progress: Progress | None = field(default=None, repr=False)
    seconds: dict[str, float] = field(default_factory=dict, repr=False)
    guest: Guest | None = field(default=None, repr=False)  # what runs in place of the model
    _statistics: dict[tuple[str, str], Statistics] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.example_inputs = Examples.of(self.example_inputs)
        if self.guest is None:
            check_model(self.model)
            self.guest = Guest.of(self.model, self.example_inputs, split_experts)
        self.model = self.guest.model

    def at_work(self) -> AbstractContextManager[None]:
        """A context in which the network may run, as in every method that asks it something."""
        assert self.guest is not None
        return self.guest.at_work()

    @cached_property
    def fresh(self) -> FreshInputs:
        """Data-free inputs of this network."""
        count = self.data if isinstance(self.data, int) else None
        return FreshInputs(self.model, self.example_inputs, self.seed, count, self.progress)

    @cached_property
    def own(self) -> InputBatches | None:
        """The user's own inputs, None where none were given."""
        if self.data is None or isinstance(self.data, (str, int, Statistics)):
            return None
        batches = own_batches(self.model, self.data)
        check_own_runs(self.model, batches, self.example_inputs)
        return batches

    @cached_property
    def own_parts(self) -> OwnInputs | None:
        """The user's own inputs, some of them held out; None where none were given."""
        if self.own is None:
            return None
        return OwnInputs.of(self.own, self._whole_batches)

    @property
    def _whole_batches(self) -> bool:
        """Whether the network takes batches of one size only."""
        return self.fresh.fixed_batch is not None

    @cached_property
    def inverted(self) -> InputBatches:
        """Images that the network's BatchNorms agree with; made once."""
        return inverted(self.model, self.fresh.collection(), self.progress)

    @memory_kept()
    @_at_work
    def statistics(self, source: str | None = None, taps: str = "auto") -> Statistics:
        """Means and covariances at every consumer, collected once for each source.

        `source` is "analytic" for those that follow from the weights; otherwise they come from
        `data`, or from procedural images where none was given.
        """
        if isinstance(self.data, Statistics):
            check_statistics(self.graph, self.data)
            check_complete(self.graph, self.data)
            return self.data
        source = self._source(source)
        if (source, taps) not in self._statistics:
            self._statistics[source, taps] = self._collect(source, taps)
        return self._statistics[source, taps]

    def adopt(self, statistics: Statistics, taps: str = "auto") -> None:
        """Take over what another process collected from this network, with this data and seed."""
        check_statistics(self.graph, statistics)
        check_complete(self.graph, statistics)
        self._statistics[self._source(None), taps] = statistics

    def _source(self, wanted: str | None) -> str:
        """Data that were given come before what a method would go by itself."""
        if isinstance(self.data, str):
            return self.data
        if self.data is not None:
            return "procedural" if isinstance(self.data, int) else "own"
        return wanted or "procedural"

    def _collect(self, source: str, taps: str) -> Statistics:
        if source == "analytic":
            return analytic_statistics(self.model, self.graph)
        prior = None
        if source == "own":
            assert self.own_parts is not None
            inputs = self.own_parts.fitted
            if not speak_for_themselves(inputs) and self.fresh.usable:
                prior = self.fresh.collection()
        elif source == "inversion":
            inputs = self.inverted
        else:
            inputs = self.fresh.collection()
        return collect(
            self.model,
            self.graph,
            inputs,
            prior=prior,
            taps=taps,
            seed=self.seed,
            progress=self.progress,
        )

    def needed(self, task: Task) -> Statistics | None:
        """The statistics that a compression needs, None where it needs none."""
        if not task.needs_statistics:
            return None
        return self.statistics(task.method.source, getattr(task.method, "taps", "auto"))

    @memory_kept()
    @_at_work
    def plan(
        self,
        ratio: Amount | None = None,
        *,
        criterion: str | Criterion | None = None,
        method: str | Method = "echo",
        multiple_of: int | None = None,
    ) -> Plan:
        """Choose the channels that stay; the model is not changed, trials are made on copies."""
        task = Task.of(ratio, criterion, method, multiple_of)
        return self._chosen(task, self.needed(task)).plan

    def _chosen(self, task: Task, statistics: Statistics | None) -> Trial:
        """The network that a task asks for, of units that compute alike at the widths chosen.

        Code may look at a width (`if h.shape[1] < 32`) that no trial cut came by.
        """
        while True:
            trial = self._chooser(task, statistics).choose()
            bad = Exactness(self.model, self.example_inputs, self.graph).wrong(trial.plan.kept)
            if not bad:
                return trial
            if isinstance(task.amount, Plan):
                names = ", ".join(sorted(bad))
                raise LbylError(f"the plan cannot be carried out at {names}: {COMPUTED_WITH}")
            self.graph = without(self.graph, dict.fromkeys(bad, COMPUTED_WITH))
            self.__dict__.pop("judges", None)  # which compare networks of this graph

    def _chooser(self, task: Task, statistics: Statistics | None) -> Chooser:
        self._check_prunable()
        return Chooser(
            self.model,
            self.graph,
            statistics,
            task,
            self.judges,
            self._time_fraction,
            self.progress,
        )

    @cached_property
    def judges(self) -> Judges:
        """What networks are compared on where there is a choice between several."""
        parts = self.own_parts
        if parts is None:
            return Judges(self.model, self.graph, self.fresh)
        normalising, held = None, parts.held
        if self.graph.norms:
            normalising = parts.normalising(self.fresh.second_pass_count, self._whole_batches)
        if held is None and not self.fresh.usable:
            held = self.own  # few that it was fitted to tell more than none
        recalibrating = normalising is not None or self.fresh.usable
        return Judges(self.model, self.graph, self.fresh, held, normalising, recalibrating)

    @memory_kept()
    @_at_work
    def forecast(self, slim: nn.Module) -> Forecast | None:
        """How much accuracy a slim network keeps; None where no input for it can be drawn."""
        told = self.progress or (lambda *at: None)
        told("forecasting", 0, 1)
        try:
            return self.judges.forecaster(slim)
        except Exception as error:  # the network is cut and restored: its model runs or does not
            note(f"no forecast: {first_line(error)}")
            return None
        finally:
            told("forecasting", 1, 1)

    @memory_kept()
    @_at_work
    def alone(
        self, plan: Plan, method: str | Method = "echo", units: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Unit → how far the network diverges where that unit alone is pruned as planned.

        The larger, the more the unit hurts. Units that a plan leaves whole are not in it, nor
        are others than `units` where those are given.
        """
        task = Task.of(plan, None, method, None)
        plan.check(self.graph)
        whole = {name: torch.arange(count) for name, count in plan.channels.items()}
        asked = plan.kept if units is None else units
        names = [name for name in plan.pruned if name in asked]
        plans = (replace(plan, kept={**whole, n: plan.kept[n]}) for n in names)
        chooser = self._chooser(task, self.needed(task))
        return dict(zip(names, chooser.rough_scores(plans), strict=True))

    def _check_prunable(self) -> None:
        if not self.graph.units:
            own = (NOT_INCLUDED, EXCLUDED)  # what the caller asked for is told first
            why = sorted(self.graph.unprunable.items(), key=lambda item: item[1] not in own)
            reasons = "; ".join(f"{name}: {reason}" for name, reason in why[:4])
            raise LbylError(
                f"nothing in this model can be pruned ({reasons or 'it has no layers'})"
            )

    def _time_fraction(self, left: Mapping[str, int]) -> float:
        """Measured time of the network with so many channels, over that of the original."""
        graph = self.graph

        def first(unit: Unit, count: int) -> Tensor:
            return first_of_blocks(torch.arange(unit.channels), count, unit)

        kept = {n: complete(graph, graph[n], first(graph[n], c)) for n, c in left.items()}
        slim = cut_for_trial(self.model, graph, kept)
        models = {"original": self.model, "slim": slim}
        timed = compare(models, self.example_inputs, device_of(self.model))
        return timed["slim"].median / timed["original"].median

    def compress(
        self,
        ratio: Amount | None = None,
        *,
        criterion: str | Criterion | None = None,
        method: str | Method = "echo",
        multiple_of: int | None = None,
        refine: Steps = 0,
    ) -> Result:
        """A smaller network and what was done to it; see `lbyl.compress` for the arguments."""
        check_steps(refine)
        return _warned(self._compressed(Task.of(ratio, criterion, method, multiple_of), refine))

    @young_objects_only()
    @memory_kept()
    @_at_work
    def _compressed(self, task: Task, refine: Steps = 0) -> Result:
        self._check_prunable()
        if getattr(task.method, "sequential", False) and self.own is None:
            raise LbylError("sequential=True needs data=: inputs of your own to fit on")
        if isinstance(task.amount, (float, int, Mapping)):
            check_ratio(self.graph, task.amount)  # before anything takes long
        if isinstance(task.amount, Budget):
            steps = steps_of(self.graph, task.multiple_of)
            check_budget(Sizes(self.graph, self.model), task.amount, steps)
        clock = Clock(self.seconds)
        statistics = self.needed(task)
        if statistics is not None:
            check_statistics(self.graph, statistics)
            if statistics is not self.data:  # what was collected before costs no time again
                clock.seconds |= statistics.seconds
        clock.skip()
        trial = self._chosen(task, statistics)
        plan, restored = trial.plan, trial.restored
        indices = kept_indices(self.graph, plan.kept)
        with noting() as notes:
            corrections = self._corrections(trial, indices, task.method)
            clock.lap("restore")
            refinement = None
            if refine:
                refinement = self._refine(restored.model, indices, refine)
                clock.lap("refine")
            # Where a size was found by it, what was checked is of this network, unless it changed.
            forecast = None if refine or corrections.sequential else trial.forecast
            forecast = forecast or self.forecast(restored.model)
            _note_missed(task, forecast)
            clock.lap("forecast")
        before = () if statistics is None else statistics.fallbacks
        source = None if statistics is None else statistics.source
        sizes = Size.of(self.model, self.graph), Size.of(restored.model, self.graph)
        with noting() as joining:
            _joined(restored.model)
        check_runs(restored.model, self.example_inputs, self.graph, plan.pruned)
        with noting() as attributes:
            follow_widths(restored.model, self.model, self.example_inputs)
        notes = [*notes, *joining]
        if plan.pruned:
            notes += [Note(name, UNREACHED) for name in self.graph.unreached]
        notes += attributes
        assert self.guest is not None
        self.guest.hand_over(restored.model)
        return Result(
            restored.model,
            plan,
            self.graph,
            *sizes,
            tuple(_rows(self.graph, plan, restored)),
            task.method.to_dict(),
            None if isinstance(task.amount, Plan) else plan.criterion or None,
            source,
            corrections,
            clock.seconds,
            refinement,
            trial.allocation,
            tuple(dict.fromkeys([*before, *trial.fallbacks, *notes])),
            forecast,
            example=self.example_inputs,
        )

    def _corrections(
        self, trial: Trial, indices: Mapping[Axis, Tensor], method: Method
    ) -> Corrections:
        """What was put back behind consumers, counted; fitting in sequence comes last."""
        written = trial.restored.consumers.values()
        counted = Corrections(
            rewritten=len(written),
            mean=sum(w.mean for w in written),
            variance=sum(w.variance for w in written),
            recalibrated=trial.recalibrated,
        )
        if not getattr(method, "sequential", False):
            return counted
        fitted = self._fit_sequentially(trial.restored.model, indices)
        return replace(counted, sequential=fitted)

    def _fit_sequentially(self, slim: nn.Module, indices: Mapping[Axis, Tensor]) -> int:
        assert self.own_parts is not None  # checked before anything took long
        batches = list(self.own_parts.fitted.batches)
        if not all(isinstance(batch, Tensor) for batch in batches):
            raise LbylError("sequential=True needs data= of single tensors")
        return len(fit_sequentially(self.model, slim, self.graph, indices, torch.cat(batches)))

    @memory_kept()
    @_at_work
    def refine(self, result: Result, steps: Steps = 100) -> Result:
        """The result of a compression of this network, refined further; it is not changed."""
        check_steps(steps)
        start = time.perf_counter()
        slim = split_experts(copy_model(result.model))
        with noting() as notes:
            done = self._refine(slim, kept_indices(self.graph, result.plan.kept), steps)
            forecast = self.forecast(slim)
            _joined(slim)
        fallbacks = tuple(dict.fromkeys([*result.fallbacks, *notes]))
        seconds = {**result.seconds, "refine": time.perf_counter() - start}
        result = replace(result, model=slim, refinement=done, forecast=forecast)
        return _warned(replace(result, seconds=seconds, fallbacks=fallbacks))

    def _refine(self, slim: nn.Module, indices: Mapping[Axis, Tensor], steps: Steps) -> Refinement:
        """Refine a slim model in place, on data-free inputs or on the user's own."""
        second_pass: InputBatches | None = self.fresh.second_pass if self.own is None else None
        if self.own_parts is not None:
            inputs = own_inputs(self.own_parts.fitted)
        elif self.data == "inversion":
            inputs = self.fresh.endless_with(self.inverted)
        else:
            inputs = self.fresh.endless(sum(rounds_of(steps)))
        return refine_in_place(
            self.model,
            slim,
            self.graph,
            indices,
            steps,
            inputs,
            second_pass,
            self.progress,
            self.judges.vocabulary,
        )

    @memory_kept()
    @_at_work
    def estimate(
        self,
        ratios: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5),
        *,
        methods: Sequence[str | Method] = ("echo",),
        criterion: str | Criterion | None = None,
    ) -> Estimate:
        """How much accuracy is forecast to be kept at every ratio under every method.

        Each point is a compression, as `compress` would make it, out of this one preparation.
        """
        points = []
        for method in map(methods_registry.resolve, methods):
            for ratio in ratios:
                by = None if method.chooses else criterion
                result = self._compressed(Task.of(ratio, by, method, None))
                points.append(EstimatePoint.of(ratio, result))
                if self.progress:
                    self.progress("estimating", len(points), len(methods) * len(ratios))
        return Estimate(tuple(points))


def refine(
    model: nn.Module,
    example_inputs: Inputs,
    result: Result,
    steps: Steps = 100,
    *,
    data: Data | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Result:
    """Refine the result of a compression of `model` further; neither is changed."""
    check_data(data)
    graph, own = result.graph, _repeatable(data)
    prepared = Prepared(model, example_inputs, graph, own, seed, callback(progress))
    return prepared.refine(result, steps)


def estimate(
    model: nn.Module,
    example_inputs: Inputs,
    ratios: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5),
    *,
    methods: Sequence[str | Method] = ("echo",),
    criterion: str | Criterion | None = None,
    data: Data | None = None,
    seed: int = 0,
) -> Estimate:
    """How much accuracy is forecast to be kept at every ratio under every method."""
    prepared = prepare(model, example_inputs, data=data, seed=seed)
    return prepared.estimate(ratios, methods=methods, criterion=criterion)


def check_data(data: Any) -> None:
    """One clear error for data that are no source."""
    if isinstance(data, str) and data not in SOURCES:
        words = ", ".join(map(repr, SOURCES))
        raise LbylError(
            f"data is {data!r}: give {words}, a number of procedural images, or your own inputs"
        )
    if isinstance(data, bool) or (isinstance(data, int) and data < 2):
        raise LbylError(f"data is {data!r}: statistics need at least 2 images")
    known = data is None or isinstance(data, (str, int, Tensor, Statistics))
    if isinstance(data, Mapping) or (not known and not isinstance(data, Iterable)):
        raise LbylError(f"data is a {type(data).__name__}: give a tensor or an iterable of batches")


def check_data_used(data: Data | None, task: Task, refine: Steps) -> None:
    """Data that nothing would look at are refused: the caller expects them to matter."""
    own = not isinstance(data, (str, int, Statistics))
    if data is None or task.needs_statistics or (refine and own):
        return
    raise LbylError(
        f"data= was given, but method {task.method.name!r} with correction "
        f"{task.method.correction!r} looks at no data: leave data= out, or choose another "
        "method, criterion or correction"
    )


def _note_missed(task: Task, forecast: Forecast | None) -> None:
    """Steps after the closed form change what was checked: if it keeps less now, say so."""
    asked = task.amount.keep if isinstance(task.amount, Budget) else None
    low = None if forecast is None else forecast.low
    if asked is not None and (low is None or low < asked):
        note(f"after its last steps at least {percent(low)} are kept, not {percent(asked)}")


def _warned(result: Result) -> Result:
    """The result, with a warning where the network is lost."""
    if result.lost:
        warnings.warn(f"the smaller network is lost: {result.forecast}", LostWarning, stacklevel=3)
    return result


def _joined(model: nn.Module) -> None:
    """Experts that were taken apart to be pruned, put together again, in place."""
    apart = join_experts(model)
    if apart:
        note("experts of different widths stay layers of their own: equal ratios make them equal")


def _repeatable(data: Data | None) -> Data | None:
    """Inputs that can be gone through again, or statistics that hold for any weights."""
    if isinstance(data, Statistics):
        return data.without_weights()
    if data is None or isinstance(data, (str, int, Tensor, list)):
        return data
    return list(data)


class Clock:
    """Seconds by stage, after those of what was prepared before."""

    def __init__(self, before: Mapping[str, float]) -> None:
        self.seconds = dict(before)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now

    def skip(self) -> None:
        self._last = time.perf_counter()


def _rows(graph: Graph, plan: Plan, restored: Restoration) -> Iterable[Row]:
    for name, kept in plan.kept.items():
        channels = plan.channels[name]
        error = restored.error_of(graph[name]) if len(kept) < channels else None
        yield Row(name, channels, len(kept), error)
