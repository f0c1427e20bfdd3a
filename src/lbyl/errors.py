"""The one error a user sees."""

from __future__ import annotations


class LbylError(ValueError):
    """Something about the given model, plan or option does not fit; the message says what to do."""
