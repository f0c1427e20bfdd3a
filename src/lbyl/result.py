"""What came of a compression: what was done, not what was asked for."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from lbyl.graph.unit import Graph
from lbyl.planning.candidates import Allocation
from lbyl.planning.plan import Plan
from lbyl.refining.distil import Refinement
from lbyl.runtime.format import counted, human, percent_change
from lbyl.runtime.notes import Note
from lbyl.runtime.run import Inputs
from lbyl.runtime.tensors import tensors
from lbyl.scoring.forecast import Forecast

WIDTH = 98  # of what is printed
UNKNOWN = "no forecast: nothing is known of the accuracy that is kept"


@dataclass(frozen=True)
class Size:
    """How large a network is."""

    parameters: int
    macs: int
    bytes: int

    @classmethod
    def of(cls, model: nn.Module, graph: Graph) -> Size:
        """Size of a model, original or slim, of the network that `graph` describes."""
        state = tensors(model)
        parameters = sum(p.numel() for p in model.parameters())
        size = sum(t.numel() * t.element_size() for t in state.values())
        macs = graph.macs({layer.weight: state[layer.weight].numel() for layer in graph.layers})
        return cls(parameters, macs, size)


@dataclass(frozen=True)
class Row:
    """One unit: how many of its channels were kept, and the error of what was written.

    `error` is that of the consumers' outputs under the weights written, relative to their variance,
    on the statistics that were collected. None where nothing was measured.
    """

    unit: str
    channels: int
    kept: int
    error: float | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """What was written of one; earlier versions wrote more."""
        return cls(data["unit"], data["channels"], data["kept"], data.get("error"))


@dataclass(frozen=True)
class Corrections:
    """Which corrections were made, counted."""

    rewritten: int = 0  # consumers that lost inputs
    mean: int = 0  # of these, the mean of the output put back
    variance: int = 0  # and its variance
    recalibrated: int = 0  # BatchNorms moved by a second run of both networks
    sequential: int = 0  # consumers fitted one after the other on the slim network's own inputs

    def __str__(self) -> str:
        counts = {
            "means corrected": self.mean,
            "variances corrected": self.variance,
            "BatchNorms recalibrated": self.recalibrated,
            "consumers fitted in sequence": self.sequential,
        }
        return ", ".join(f"{count} {noun}" for noun, count in counts.items() if count) or "none"


@dataclass(frozen=True)
class Result:
    """The smaller model and what was done to it."""

    model: nn.Module = field(repr=False)
    plan: Plan = field(repr=False)
    graph: Graph = field(repr=False)
    before: Size
    after: Size
    rows: tuple[Row, ...]
    method: Mapping[str, Any]  # name and settings
    criterion: Mapping[str, Any] | None  # None: none was used
    data: str | None  # what statistics came from; None: nothing was run or computed
    corrections: Corrections
    seconds: Mapping[str, float]
    refinement: Refinement | None = None
    allocation: Allocation | None = None  # how widths were chosen, where there was a choice
    fallbacks: tuple[Note, ...] = ()  # what was done instead of what could not be computed
    forecast: Forecast | None = None  # how much accuracy is kept, told without data
    example: Inputs = field(default=None, repr=False, compare=False)  # the network was traced on

    @property
    def lost(self) -> bool:
        """Whether it is forecast to keep less than half of the accuracy, at best."""
        return self.forecast is not None and self.forecast.lost

    @property
    def expected(self) -> list[str]:
        """How much accuracy is kept, and what stands behind that, a line each."""
        if self.forecast is None:
            return [UNKNOWN]
        return [line for line in (str(self.forecast), self.forecast.standing) if line]

    def behind(self, plan: Plan, before: Size) -> Result:
        """The same told of the network that `plan` had made smaller before, of size `before`."""
        whole = plan.then(self.plan)
        rows = [replace(row, channels=whole.channels[row.unit]) for row in self.rows]
        known = {row.unit for row in rows}
        rows += [
            Row(name, whole.channels[name], len(kept))
            for name, kept in whole.kept.items()
            if name not in known
        ]
        return replace(self, plan=whole, before=before, rows=tuple(rows))

    def to_dict(self, plan: bool = True) -> dict[str, Any]:
        """Everything but the model, as plain data."""
        data: dict[str, Any] = {
            "method": dict(self.method),
            "criterion": None if self.criterion is None else dict(self.criterion),
            "data": self.data,
            "corrections": asdict(self.corrections),
            "refinement": None if self.refinement is None else asdict(self.refinement),
            "allocation": None if self.allocation is None else asdict(self.allocation),
            "fallbacks": list(self.fallbacks),
            "forecast": None if self.forecast is None else asdict(self.forecast),
            "before": asdict(self.before),
            "after": asdict(self.after),
            "rows": [asdict(row) for row in self.rows],
            "unprunable": dict(self.graph.unprunable),
            "seconds": dict(self.seconds),
        }
        return {**data, "plan": self.plan.to_dict()} if plan else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], model: nn.Module, plan: Plan) -> Result:
        """The result that `to_dict` described; its graph holds only the unprunable layers."""
        refinement, allocation = data["refinement"], data["allocation"]
        forecast = data.get("forecast")
        return cls(
            model,
            plan,
            Graph.empty(data["unprunable"]),
            Size(**data["before"]),
            Size(**data["after"]),
            tuple(Row.of(row) for row in data["rows"]),
            data["method"],
            data["criterion"],
            data["data"],
            Corrections(**data["corrections"]),
            data["seconds"],
            None if refinement is None else Refinement(**refinement),
            None
            if allocation is None
            else Allocation(**{**allocation, "spared": tuple(allocation["spared"])}),
            tuple(Note("", line) for line in data.get("fallbacks", ())),
            None if forecast is None else Forecast(**forecast),
        )

    @property
    def chosen_by(self) -> str:
        """Who chose the channels: a criterion, the method itself, or a plan that was given."""
        if self.criterion is not None:
            return str(self.criterion["name"])
        if self.plan.method and self.plan.method == self.method:
            return "its own choice"
        origin = self.plan.chosen_by
        return f"a given plan (by {origin})" if origin else "a given plan"

    @property
    def story(self) -> str:
        """In one line: who chose, what restored, on what, and what followed."""
        parts = [f"{self.method['name']} after {self.chosen_by}"]
        parts += [str(self.allocation)] if self.allocation else []
        parts += [f"on {self.data} statistics"] if self.data else []
        parts += [str(self.corrections)] if self.corrections.mean else []
        parts += [str(self.refinement)] if self.refinement else []
        return ", ".join(parts)

    def __str__(self) -> str:
        sizes = [
            (noun, getattr(self.before, key), getattr(self.after, key))
            for noun, key in (("parameters", "parameters"), ("MACs", "macs"), ("bytes", "bytes"))
        ]
        lines = [
            *(part for line in self.expected for part in textwrap.wrap(line, WIDTH)),
            *textwrap.wrap(self.story, WIDTH),
            f"{counted(len(self.rows), 'unit')}, {sum(self.seconds.values()):.2f} s",
            *(
                f"{noun:<11}{human(was):>9} → {human(now):>9}  ({percent_change(was, now)})"
                for noun, was, now in sizes
            ),
            "",
            *self._table(),
        ]
        if self.fallbacks:
            more = f" (and {len(self.fallbacks) - 1} more)" if len(self.fallbacks) > 1 else ""
            lines += ["", *textwrap.wrap(f"fallbacks: {self.fallbacks[0]}{more}", WIDTH)]
        if self.graph.unprunable:
            lines += ["", f"{len(self.graph.unprunable)} unprunable layers (see print(graph))"]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        measured = any(row.error is not None for row in self.rows)
        width = max([len(row.unit) for row in self.rows] + [4])
        head = f"{'unit':<{width}}  {'kept':>11}" + ("     error" if measured else "")
        return [head] + [
            f"{row.unit:<{width}}  {row.kept:>5}/{row.channels:<5}"
            + (f"  {_cell(row.error):>8}" if measured else "")
            for row in self.rows
        ]


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


@dataclass(frozen=True)
class EstimatePoint:
    """One compression: how much smaller the network gets, and what it is forecast to keep."""

    ratio: float
    method: str
    parameters: float  # fraction that stays
    macs: float
    forecast: Forecast | None
    errors: Mapping[str, float | None] = field(default_factory=dict)  # unit → at its consumers

    @classmethod
    def of(cls, ratio: float, result: Result) -> EstimatePoint:
        before, after = result.before, result.after
        return cls(
            ratio,
            str(result.method["name"]),
            after.parameters / max(before.parameters, 1),
            after.macs / max(before.macs, 1),
            result.forecast,
            {row.unit: row.error for row in result.rows if row.kept < row.channels},
        )


@dataclass(frozen=True)
class Estimate:
    """A curve to decide by: accuracy forecast to be kept, against what is pruned."""

    points: tuple[EstimatePoint, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"points": [asdict(point) for point in self.points]}

    def __str__(self) -> str:
        lines = [f"{'method':<15} pruned    MACs  parameters  forecast"]
        for p in self.points:
            sizes = f"{100 * p.macs:>4.0f} %      {100 * p.parameters:>4.0f} %"
            lines.append(f"{p.method:<15} {100 * p.ratio:>4.0f} %  {sizes}  {p.forecast or '–'}")
        return "\n".join(lines)
