"""What is to be pruned, with every argument resolved and none in contradiction to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lbyl.errors import LbylError
from lbyl.graph.unit import Graph
from lbyl.graph.weights import State, unit_weights
from lbyl.methods import Method
from lbyl.methods import registry as methods
from lbyl.planning.budget import Budget
from lbyl.planning.criteria import Criterion
from lbyl.planning.criteria import registry as criteria
from lbyl.planning.elimination import EchoCriterion
from lbyl.planning.plan import Plan
from lbyl.planning.ratio import check_multiple
from lbyl.statistics.moments import Statistics
from lbyl.surgery.indices import complete

DEFAULT_RATIO = 0.3
DEFAULT_CRITERION = "l2"

Amount = float | Mapping[str, float] | Budget | Plan
"""What is pruned: one ratio, patterns with a ratio each, a budget, or a plan made before."""


Chosen = dict[tuple[str, int], Tensor]
"""Unit and number of channels → those that are kept."""


@dataclass(frozen=True)
class Task:
    """One compression, with every argument resolved and none in contradiction to another."""

    amount: Amount
    criteria: tuple[Criterion | None, ...]  # to choose between; None: the method or plan chose
    method: Method
    multiple_of: int | None = None

    @property
    def needs_statistics(self) -> bool:
        """Whether anything in it looks at means and covariances."""
        return (
            self.method.needs_statistics
            or self.method.corrects
            or isinstance(self.amount, Budget)
            or any(c is not None and c.needs_statistics for c in self.criteria)
        )

    @classmethod
    def of(
        cls,
        ratio: Amount | None,
        criterion: str | Criterion | None,
        method: str | Method,
        multiple_of: int | None,
    ) -> Task:
        """Resolve names; one clear error where two arguments contradict each other."""
        resolved = methods.resolve(method)
        if not isinstance(resolved, Method):
            raise LbylError(f"{resolved!r} is no method; the known ones are {methods.names()}")
        check_multiple(multiple_of)
        if isinstance(ratio, Plan):
            for name, value in (("criterion", criterion), ("multiple_of", multiple_of)):
                if value is not None:
                    raise LbylError(
                        f"a plan says which channels stay, so {name}= has no say: leave it out, "
                        "or give a ratio instead of the plan"
                    )
            return cls(ratio, (None,), resolved)
        if resolved.chooses:
            if criterion is not None:
                raise LbylError(
                    f"method {resolved.name!r} chooses its channels itself, so criterion= has no "
                    "say: leave it out"
                )
            return cls(DEFAULT_RATIO if ratio is None else ratio, (None,), resolved, multiple_of)
        amount = DEFAULT_RATIO if ratio is None else ratio
        if criterion is None and resolved.tries:
            return cls(amount, (criteria.resolve("l2"), EchoCriterion()), resolved, multiple_of)
        scoring = criteria.resolve(DEFAULT_CRITERION if criterion is None else criterion)
        if not isinstance(scoring, Criterion):
            raise LbylError(f"{scoring!r} is no criterion; the known ones are {criteria.names()}")
        return cls(amount, (scoring,), resolved, multiple_of)


def make_plan(
    model: nn.Module,
    graph: Graph,
    left: Mapping[str, int],
    method: Method,
    criterion: Criterion | None,
    statistics: Statistics | None = None,
    chosen: Chosen | None = None,
    state: State | None = None,
) -> Plan:
    """Choose the kept channels of units, so many of each; without criterion by the method.

    Units that `left` does not name stay whole. `chosen` are choices of the same criterion and
    method that were made before; others are added.
    """
    chosen = {} if chosen is None else chosen
    open_choices = {name: n for name, n in left.items() if (name, n) not in chosen}
    weights = unit_weights(graph, model, state, open_choices) if open_choices else {}
    if criterion is not None:
        less = [  # whole ones are asked for no order; no result depends on it
            name for name, count in open_choices.items() if count < graph[name].channels
        ]
        criterion.prepare([weights[name] for name in less], statistics)
    for name, count in open_choices.items():
        unit = weights.pop(name)  # so that what it reads in float64 is freed before the next
        if count == unit.unit.channels:
            kept = torch.arange(count)
        elif criterion is None and unit.unit.consumers:
            kept = method.select(unit, count)
        elif criterion is None:  # queries and keys: methods choose by what layers read
            kept = criteria.resolve(DEFAULT_CRITERION).select(unit, count, statistics)
        else:
            kept = criterion.select(unit, count, statistics)
        if name in graph.parts:
            kept = complete(graph, unit.unit, kept, unit.filters.norm(dim=1))
        chosen[name, count] = kept
    kept_by_unit = {name: chosen[name, count] for name, count in left.items()}
    sizes = {unit.name: unit.channels for unit in graph.units}
    if criterion is None:
        return Plan(kept_by_unit, sizes, method=method.to_dict())
    return Plan(kept_by_unit, sizes, criterion=criterion.to_dict())
