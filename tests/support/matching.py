"""Moments of one consumer matched to running statistics."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

# private: the same
from lbyl.statistics.match import Known, matched_alike

# private: matching has no entrance of its own, and what it does alone is compared with a reference
from lbyl.statistics.moments import Moments


def copied(moments: Moments) -> Moments:
    """With a covariance of its own: matching writes over it."""
    return replace(moments, covariance=moments.covariance.clone())


def matched(moments: Moments, weight: Tensor, mean: Tensor, variance: Tensor) -> Moments:
    """The new ones, or those given where they could not be matched; these are not changed."""
    own = copied(moments)
    (new,) = matched_alike([Known(own, weight, mean, variance)])
    return moments if new is None or new is own else new
