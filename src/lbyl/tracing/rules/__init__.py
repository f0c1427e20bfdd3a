"""What each torch function does to channels.

A rule takes the flow of labels and one recorded call, ties and pins atoms, and returns the labels
of the call's outputs. The rules of one kind of function stand in one file; importing it registers
them. A function without a rule is opaque: everything that enters it is pinned, so an unknown
function can cost compression but never correctness.
"""

from lbyl.tracing.labels import select_first
from lbyl.tracing.rules import (
    declared,
    indexing,
    layers,
    mixing,
    movement,
    normalisation,
    pointwise,
)
from lbyl.tracing.rules.base import RULES, opaque, propagate, rule

__all__ = ["RULES", "opaque", "propagate", "rule", "select_first"]
__all__ += ["declared", "indexing", "layers", "mixing", "movement", "normalisation", "pointwise"]
