"""`moments`: restoration from statistics that follow from the weights alone.

The same regression as `echo`, on covariances computed instead of measured: nothing is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lbyl.methods.base import registry
from lbyl.methods.echo import Echo


@registry.register("moments")
@dataclass(frozen=True)
class AnalyticMoments(Echo):
    """V' = V_P + V_Q C_QP (C_PP + εI)⁻¹ with C from BatchNorm, filters and activation.

    Where C does not follow from the weights (no BatchNorm right behind the filters, sums of several
    layers) pruned channels are left out, as with `none`.
    """

    correction: str = field(default="mean+variance", kw_only=True)  # more would run images

    source: ClassVar[str] = "analytic"
