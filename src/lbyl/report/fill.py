"""Everything the report can show that a result does not hold by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from lbyl.errors import errors
from lbyl.estimate import moment_ware
from lbyl.record import Inputs
from lbyl.report.heatmap import downsample
from lbyl.restore import Method, methods
from lbyl.result import Result
from lbyl.statistics import Statistics, collect
from lbyl.statistics.analytic import analytic_statistics
from lbyl.weights import unit_weights

COMPARED = ("none", "neuron-merging", "lbyl", "echo")


def gather(
    model: nn.Module,
    example_inputs: Inputs,
    result: Result,
    methods: Sequence[str | Method] = COMPARED,
    *,
    statistics: Statistics | None = None,
) -> dict[str, Any]:
    """Arguments for `write_report`: errors of other methods under the same plan, and deliveries.

    `model` is the original. Statistics are collected (without data) only where a method needs
    them and none are given; with them the reconstruction error of activations is told as well.
    """
    chosen = [_resolve(method) for method in methods]
    own = _used(result)
    if statistics is None and any(_measures(m) for m in [*chosen, own]):
        statistics = collect(model, example_inputs, graph=result.graph)
    comparing = _Comparing(model, result, statistics)
    # What was done is shown as it was done, not as a method of that name would do by default.
    everyone = {m.name: m for m in [*chosen, own]}
    rows = {name: comparing.rows(method) for name, method in everyone.items()}
    return {"errors": rows, "delivery": comparing.matrices(own)}


def _resolve(method: Any) -> Method:
    return methods.resolve(method)


def _used(result: Result) -> Method:
    """The method with its options, where the plan was made for it; plans can also be given."""
    told = dict(result.plan.method)
    return _resolve(told if told.get("name") == result.method else result.method)


def _measures(method: Method) -> bool:
    return method.needs_statistics and not method.analytic


class _Comparing:
    """Several methods under one plan."""

    def __init__(self, model: nn.Module, result: Result, statistics: Statistics | None) -> None:
        plan = result.plan
        self.model, self.graph, self.statistics = model, result.graph, statistics
        self.weights = unit_weights(result.graph, model)
        self.pruned = {n: k for n, k in plan.kept.items() if len(k) < plan.channels[n]}

    def deliveries(self, method: Method) -> dict[str, Tensor]:
        """Unit → delivery matrix, from the statistics that the method goes by."""
        known = self.statistics
        if method.analytic:
            known = analytic_statistics(self.model, self.graph)
        with torch.no_grad():
            return {
                name: method.deliver(self.weights[name], kept, known).matrix
                for name, kept in self.pruned.items()
            }

    def matrices(self, method: Method) -> dict[str, Tensor]:
        """Small enough to paint."""
        return {n: downsample(matrix.cpu()) for n, matrix in self.deliveries(method).items()}

    def rows(self, method: Method) -> list[dict[str, Any]]:
        """What the method leaves behind in every unit."""
        rows = []
        for name, matrix in self.deliveries(method).items():
            weights, kept = self.weights[name], self.pruned[name]
            row = {"unit": name, **asdict(errors(weights, kept, matrix))}
            if self.statistics is not None:
                row["ware"] = moment_ware(weights, kept, matrix, self.statistics)
            rows.append(row)
        return rows
