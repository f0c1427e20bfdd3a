"""The one error a user sees, and the one warning."""

from __future__ import annotations


class LostWarning(UserWarning):
    """A network was returned that is forecast to keep less than half of the accuracy."""


class LbylError(ValueError):
    """Something about the given model, plan or option does not fit; the message says what to do."""
