"""What came of a compression, to print, to keep and to save."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from lbyl.plan import Plan
from lbyl.surgery import tensors
from lbyl.unit import Graph


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
        macs = graph.macs({c.weight: state[c.weight].numel() for c in graph.contractions})
        return cls(parameters, macs, size)


@dataclass(frozen=True)
class Row:
    """One unit in the report."""

    unit: str
    channels: int
    kept: int
    residual: float  # RE
    bias: float  # BE
    norm: float  # mean ‖s‖


@dataclass(frozen=True)
class Result:
    """The smaller model and its story."""

    model: nn.Module = field(repr=False)
    plan: Plan = field(repr=False)
    graph: Graph = field(repr=False)
    before: Size
    after: Size
    rows: tuple[Row, ...]
    method: str
    criterion: str
    repair: str
    seconds: dict[str, float]
    refine: int = 0  # steps

    def to_dict(self, plan: bool = True) -> dict[str, Any]:
        """Everything but the model, as plain data."""
        data: dict[str, Any] = {
            "method": self.method,
            "criterion": self.criterion,
            "repair": self.repair,
            "refine": self.refine,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "rows": [asdict(row) for row in self.rows],
            "left_alone": dict(self.graph.left_alone),
            "seconds": dict(self.seconds),
        }
        return {**data, "plan": self.plan.to_dict()} if plan else data

    def __str__(self) -> str:
        lines = [
            f"{self.method} after {self.criterion}{refined(self.refine)}, {len(self.rows)} units, "
            f"{sum(self.seconds.values()):.2f} s",
            _change("parameters", self.before.parameters, self.after.parameters),
            _change("MACs", self.before.macs, self.after.macs),
            _change("bytes", self.before.bytes, self.after.bytes),
            "",
            *self._table(),
        ]
        if self.graph.left_alone:
            lines += ["", f"{len(self.graph.left_alone)} layers left alone (see print(graph))"]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        width = max([len(row.unit) for row in self.rows] + [4])
        head = f"{'unit':<{width}}  {'kept':>11}  {'RE':>8}  {'BE':>8}  {'‖s‖':>7}"
        return [head] + [
            f"{r.unit:<{width}}  {r.kept:>5}/{r.channels:<5}  {r.residual:>8.4f}  {r.bias:>8.4f}"
            f"  {r.norm:>7.3f}"
            for r in self.rows
        ]


def refined(steps: int) -> str:
    """What is said of refinement, where there was any."""
    return f", refined by {steps} step{'s' if steps > 1 else ''}" if steps else ""


def _change(noun: str, before: int, after: int) -> str:
    share = 100 * (after / before - 1) if before else 0.0
    return f"{noun:<11}{_human(before):>9} → {_human(after):>9}  ({share:+.1f} %)"


def _human(count: int) -> str:
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.2f}{suffix}"
    return str(count)
