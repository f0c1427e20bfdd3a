"""`lbyl.load`: a saved network, also where only its plan says which network it was."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lbyl.app.sources.resolve import resolve
from lbyl.storage.files import load as load_into


def load(directory: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The smaller network that was saved in a directory.

    `model` is a freshly constructed network of the original class; it gets the slim shapes and
    weights, only when everything fits, and is returned. Without it the network is built anew, in
    evaluation mode, where plan.json names one that no code of the user's own makes.
    """
    if model is not None:
        return load_into(directory, model)
    return resolve(str(directory)).model
