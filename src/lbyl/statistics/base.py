"""Means and covariances at the inputs of consumers, whatever they were measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lbyl.exceptions import LbylError


@dataclass(frozen=True)
class Moments:
    """First and second moments of what a consumer reads.

    A consumer's weight is (outputs, inputs, taps). With `taps` > 1 every input at every kernel tap
    is a feature of its own; otherwise only inputs are, and `spatial` (taps × taps) says how much
    one input at different taps is alike. `columns` (features, columns each) regroups the inputs
    of a linear layer behind a flatten by channel.
    """

    mean: Tensor  # (features, taps)
    covariance: Tensor  # (features · taps, features · taps)
    taps: int = 1
    spatial: Tensor | None = None
    columns: Tensor | None = None
    samples: int = 0

    def arrange(self, weight: Tensor) -> Tensor:
        """A weight (outputs, inputs, taps) with inputs regrouped into features."""
        if self.columns is None:
            return weight
        columns = self.columns.to(weight.device)
        return weight[:, columns.flatten()].unflatten(1, columns.shape).flatten(2)

    def restore_order(self, arranged: Tensor, alive: Tensor, taps: int) -> Tensor:
        """Undo `arrange` for the features that are `alive`: back to (outputs, inputs, taps)."""
        if self.columns is None:
            return arranged
        columns = self.columns[self.features_alive(alive).cpu()]
        flat = arranged.unflatten(2, (columns.shape[1], taps)).flatten(1, 2)
        return flat[:, torch.argsort(columns.flatten()).to(flat.device)]

    def features_alive(self, alive: Tensor) -> Tensor:
        """Flags by input column as flags by feature."""
        return alive if self.columns is None else alive[self.columns[:, 0]]

    def output_mean(self, weight: Tensor, alive: Tensor | None = None) -> Tensor:
        """(outputs,): mean of the consumer's output for an arranged weight."""
        mean = self.mean if alive is None else self.mean[alive.to(self.mean.device)]
        return (weight * mean.to(weight)).sum((1, 2))

    def output_variance(self, weight: Tensor, alive: Tensor | None = None) -> Tensor:
        """(outputs,): variance of the consumer's output for an arranged weight."""
        covariance = self.covariance
        if alive is not None:
            places = torch.nonzero(self.spread(alive)).reshape(-1).to(covariance.device)
            covariance = covariance[places][:, places]
        covariance = covariance.to(weight)
        if self.taps == weight.shape[2]:
            flat = weight.flatten(1)
            return ((flat @ covariance) * flat).sum(1)
        spatial = self.spatial
        if spatial is None:
            spatial = torch.ones(weight.shape[2], weight.shape[2])
        mixed = torch.einsum("ofk,kl->lof", weight, spatial.to(weight))
        return ((mixed @ covariance) * weight.permute(2, 0, 1)).sum((0, 2))

    def spread(self, alive: Tensor) -> Tensor:
        """Flags by feature as flags by row of the covariance."""
        return alive.repeat_interleave(self.taps)

    def channel_level(self) -> tuple[Tensor, Tensor]:
        """Mean (features,) and covariance (features, features) with taps averaged out."""
        n = self.mean.shape[0]
        if self.taps == 1:
            return self.mean[:, 0], self.covariance
        blocks = self.covariance.reshape(n, self.taps, n, self.taps)
        return self.mean.mean(1), blocks.diagonal(dim1=1, dim2=3).mean(-1)


@dataclass(frozen=True)
class Statistics:
    """Moments at every consumer of a network: good for any ratio, criterion and method."""

    moments: Mapping[str, Moments]
    source: str = "procedural"
    seconds: Mapping[str, float] = field(default_factory=dict)

    def get(self, name: str) -> Moments | None:
        return self.moments.get(name)

    def to(self, device: torch.device | str) -> Statistics:
        """The same on another device."""
        moved = {
            name: Moments(
                m.mean.to(device), m.covariance.to(device), m.taps, m.spatial, m.columns, m.samples
            )
            for name, m in self.moments.items()
        }
        return Statistics(moved, self.source, self.seconds)

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file, atomically."""
        from lbyl.io import write_tensors

        parts: dict[str, Tensor] = {}
        for name, m in self.moments.items():
            for key in ("mean", "covariance", "spatial", "columns"):
                value = getattr(m, key)
                if value is not None:
                    parts[f"{name}|{key}"] = value
        counts = {name: [m.taps, m.samples] for name, m in self.moments.items()}
        notes = {"source": self.source, "counts": json.dumps(counts), "format": "lbyl-statistics-1"}
        write_tensors(Path(path), parts, notes)

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read what `save` wrote."""
        from lbyl.io import read_tensors

        if not Path(path).is_file():
            raise LbylError(f"no statistics file at {path}")
        found, notes = read_tensors(Path(path), "is damaged, collect the statistics again")
        if notes.get("format") != "lbyl-statistics-1":
            raise LbylError(f"{path} holds no statistics of lbyl")
        parts: dict[str, dict[str, Tensor]] = {}
        for key, value in found.items():
            name, _, part = key.rpartition("|")
            parts.setdefault(name, {})[part] = value
        counts = json.loads(notes["counts"])
        moments = {
            name: Moments(
                tensors["mean"],
                tensors["covariance"],
                counts[name][0],
                tensors.get("spatial"),
                tensors.get("columns"),
                counts[name][1],
            )
            for name, tensors in parts.items()
        }
        return cls(moments, notes["source"])
