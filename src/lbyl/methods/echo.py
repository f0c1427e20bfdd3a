"""`echo`: restoration from statistics of the original network, matched to its BatchNorms.

Regress what the pruned inputs of a consumer carried on its kept inputs, with the covariance the
original network shows on procedural images. No data, no search, any activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.methods.base import Delivery, Found, Method, Rewrite, identity_rows, registry
from lbyl.runtime.tensors import places
from lbyl.statistics.moments import TAPS
from lbyl.statistics.solve import (
    RIDGE,
    Regressed,
    Regression,
    deliver_together,
    deliver_weight,
    regress,
)
from lbyl.statistics.units import unit_covariance
from lbyl.surgery.indices import pruned_of

if TYPE_CHECKING:
    from lbyl.graph.weights import UnitWeights
    from lbyl.statistics.moments import Statistics


@registry.register("echo")
@dataclass(frozen=True)
class Echo(Method):
    """V' = V_P + V_Q C_QP (C_PP + εI)⁻¹, each consumer on its own."""

    ridge: float = RIDGE
    taps: str = field(default="auto", kw_only=True)  # or "channels": kernel taps served alike
    sequential: bool = field(default=False, kw_only=True)  # fit in order, on own data
    correction: str = field(default="recalibrate", kw_only=True)
    new_bias: bool = field(default=True, kw_only=True)  # may a consumer get one that had none

    needs_statistics: ClassVar[bool] = True
    by_unit: ClassVar[bool] = False
    restores_products: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps not in TAPS:
            raise LbylError(f"taps is {self.taps!r}: it must be {' or '.join(map(repr, TAPS))}")
        if self.ridge < 0:
            raise LbylError("echo's ridge must not be negative")

    def deliver(
        self, weights: UnitWeights, kept: Tensor, statistics: Statistics | None
    ) -> Delivery:
        """The delivery by channel, for the report; consumers are solved in finer detail."""
        matrix = identity_rows(weights.unit.channels, kept, weights.filters)
        pruned = pruned_of(weights.unit.channels, kept).to(matrix.device)
        covariance = unit_covariance(weights, statistics)
        if len(pruned) and covariance is not None:
            kept = kept.to(matrix.device)
            covariance = covariance.to(matrix)
            matrix[pruned] = regress(
                covariance[pruned[:, None], kept], covariance[kept[:, None], kept], self.ridge
            )
        return Delivery(matrix)

    def rewrite(self, rewrite: Rewrite) -> Tensor:
        moments = rewrite.moments
        if moments is None:  # nothing was measured at this consumer
            return super().rewrite(rewrite)
        weight = moments.arrange(rewrite.weight)  # (o, features, taps)
        features = moments.kept_features(rewrite.kept_columns)
        if moments.taps == weight.shape[2]:  # every tap is a feature
            rows = moments.by_tap(features)
            flat = weight.flatten(1)
        else:  # taps are served alike
            rows = features
            flat = weight.transpose(1, 2).flatten(0, 1)
        covariance, mixed = moments.covariance.to(weight), rewrite.mixed
        if not rewrite.takes_mean:  # it is part of what the kept inputs take over
            mean = moments.mean.flatten().to(weight)
            covariance, mixed = covariance + torch.outer(mean, mean), None
        kept, pruned = (places(flags, weight.device) for flags in (rows, ~rows))
        delivered = deliver_weight(flat, covariance, kept, pruned, self.ridge, mixed)
        if moments.taps == weight.shape[2]:
            new = delivered.weight.unflatten(1, (-1, moments.taps))
        else:
            new = delivered.weight.unflatten(0, (weight.shape[0], -1)).transpose(1, 2)
        new = moments.restore_order(new, rewrite.kept_columns, rewrite.weight.shape[2])
        if delivered.mixed is not None and delivered.across is not None:
            known = delivered.weight, kept, delivered.mixed, delivered.across
            rewrite.found.append(Found(new, *known))
        return new

    def rewrite_alike(self, regressions: Sequence[Regression]) -> Regressed | None:
        if type(self).rewrite is not Echo.rewrite:  # who rewrites otherwise, does so singly
            return None
        return deliver_together(regressions, self.ridge)
