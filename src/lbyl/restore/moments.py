"""`moments`: restoration from statistics that follow from the weights alone.

The same regression as `echo`, on covariances computed instead of measured: nothing is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lbyl.restore.base import methods
from lbyl.restore.echo import Echo


@methods.register("moments")
@dataclass(frozen=True)
class AnalyticMoments(Echo):
    """V' = V_P + V_Q C_QP (C_PP + εI)⁻¹ with C from BatchNorm, filters and activation.

    Where the weights do not tell C (no BatchNorm right behind the filters, sums of several layers)
    pruned channels are left out, as with `none`.
    """

    statistics_source: ClassVar[str] = "analytic"
    default_repair: ClassVar[str] = "mean+variance"  # "network" would run images
