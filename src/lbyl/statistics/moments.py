"""Means and covariances at the inputs of consumers, whatever they were measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.runtime.files import read_tensors, write_tensors
from lbyl.runtime.notes import Note
from lbyl.runtime.tensors import places
from lbyl.statistics.products import ProductMoments

FORMAT = "lbyl-statistics-2"
DAMAGED = "is damaged, collect the statistics again"
PRODUCTS = ("gram", "query", "key")
TAPS = ("auto", "channels")  # every tap a feature where affordable, or taps served alike


@dataclass(frozen=True)
class Moments:
    """First and second moments of what a consumer reads.

    A consumer's weight is (outputs, inputs, taps). With `taps` > 1 every input at every kernel tap
    is a feature of its own; otherwise only inputs are, and `spatial` (taps × taps) says how much
    one input at different taps is alike. `columns` (features, columns each) regroups the inputs
    of a linear layer behind a flatten by channel. `mixed` is what the consumer's weight, flattened,
    makes of the covariance, where somebody came to know it and it is small beside the covariance.
    """

    mean: Tensor  # (features, taps)
    covariance: Tensor  # (features · taps, features · taps)
    taps: int = 1
    spatial: Tensor | None = None
    columns: Tensor | None = None
    mixed: Tensor | None = None  # (outputs, features · taps)

    @property
    def numbers(self) -> list[Tensor]:
        """What must be finite."""
        parts = (self.mean, self.covariance, self.spatial)
        return [part for part in parts if part is not None]

    def arrange(self, weight: Tensor) -> Tensor:
        """A weight (outputs, inputs, taps) with inputs regrouped into features."""
        if self.columns is None:
            return weight
        columns = self.columns.to(weight.device)
        return weight[:, columns.flatten()].unflatten(1, columns.shape).flatten(2)

    def restore_order(self, arranged: Tensor, kept: Tensor, taps: int) -> Tensor:
        """Undo `arrange` for the features that are `kept`: back to (outputs, inputs, taps)."""
        if self.columns is None:
            return arranged
        columns = self.columns[self.kept_features(kept).cpu()]
        flat = arranged.unflatten(2, (columns.shape[1], taps)).flatten(1, 2)
        return flat[:, torch.argsort(columns.flatten()).to(flat.device)]

    def kept_features(self, kept: Tensor) -> Tensor:
        """Flags by input column as flags by feature."""
        return kept if self.columns is None else kept[self.columns[:, 0]]

    def output_mean(self, weight: Tensor, kept: Tensor | None = None) -> Tensor:
        """(outputs,): mean of the consumer's output for an arranged weight."""
        mean = self.mean
        if kept is not None:
            mean = mean.index_select(0, places(kept.cpu(), mean.device))
        return (weight * mean.to(weight)).sum((1, 2))

    def output_variance(self, weight: Tensor, features: Tensor) -> Tensor:
        """(outputs,): variance of what the consumer makes of some features.

        `weight` (outputs, those features, taps) is arranged; `features` are flags.
        """
        rows = places(self.by_tap(features), self.covariance.device)
        part = self.covariance[rows[:, None], rows].to(weight)
        if self.taps == weight.shape[2]:
            flat = weight.flatten(1)
            return ((flat @ part) * flat).sum(1)
        mixed = torch.einsum("ofk,kl->lof", weight, self._between_taps(weight)) @ part
        return (mixed * weight.permute(2, 0, 1)).sum((0, 2))

    def _between_taps(self, weight: Tensor) -> Tensor:
        """(taps, taps): correlations of one input at different taps, 1 where not measured."""
        taps = weight.shape[2]
        return (torch.ones(taps, taps) if self.spatial is None else self.spatial).to(weight)

    def output_change(
        self,
        before: Tensor,
        after: Tensor,
        kept: Tensor,
        mixed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Variances (outputs,) of the consumer's output: before, after, and of their difference.

        `before` (outputs, features, taps) is over all features, `after` over those that are kept;
        both arranged. `mixed` is `before` times the covariance, where that is known.
        """
        rows = places(self.by_tap(kept), self.covariance.device)
        if self.taps == before.shape[2]:
            old, new, summed = before.flatten(1), after.flatten(1), [1]
            mixed = old @ self.covariance.to(before) if mixed is None else mixed
            mixed_new = new @ self.covariance[rows[:, None], rows].to(after)
        else:
            whole = self.covariance.to(before)
            part = self.covariance[rows[:, None], rows].to(after)
            spatial = self._between_taps(before)
            old, new, summed = before.permute(2, 0, 1), after.permute(2, 0, 1), [0, 2]
            mixed = torch.einsum("ofk,kl->lof", before, spatial) @ whole
            mixed_new = torch.einsum("ofk,kl->lof", after, spatial) @ part
        was, now = (mixed * old).sum(summed), (mixed_new * new).sum(summed)
        both = (mixed[..., rows.to(before.device)] * new).sum(summed)
        return was, now, was + now - 2 * both

    def blended(self, other: Moments, weight: float) -> Moments:
        """These times `weight` and others of the same consumer for the rest, in place of these."""
        spatial = self.spatial
        if spatial is not None and other.spatial is not None:
            spatial = torch.lerp(other.spatial, spatial, weight)
        return replace(
            self,
            mean=torch.lerp(other.mean, self.mean, weight),
            covariance=self.covariance.lerp_(other.covariance, 1 - weight),
            spatial=spatial,
            mixed=None,
        )

    def by_tap(self, kept: Tensor) -> Tensor:
        """Flags by feature as flags by row of the covariance."""
        return kept.repeat_interleave(self.taps)

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
    fallbacks: tuple[Note, ...] = ()  # what was done instead of what could not be computed
    # Orders of elimination, worked out when first asked for: budgets and criteria share them.
    orders: dict[tuple[str, float], list[tuple[int, float]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    # Unit → what its consumers make of all its channels, as one number; known with its order.
    totals: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    # Unit of queries and keys → moments of their products.
    products: Mapping[str, ProductMoments] = field(default_factory=dict)

    def get(self, name: str) -> Moments | None:
        return self.moments.get(name)

    def blended(self, other: Statistics, weight: float) -> Statistics:
        """These times `weight` and others of the same network for the rest, in place of these."""
        moments = {
            name: own.blended(other.moments[name], weight) if name in other.moments else own
            for name, own in self.moments.items()
        }
        products = {
            name: own.blended(other.products[name], weight) if name in other.products else own
            for name, own in self.products.items()
        }
        source, seconds = f"{self.source} and {other.source}", {**other.seconds, **self.seconds}
        return replace(self, moments=moments, products=products, source=source, seconds=seconds)

    @property
    def outlines(self) -> Mapping[str, Moments]:
        """Moments without covariances, where those wait on the disk: nothing is read for them."""
        outlines: Mapping[str, Moments] = getattr(self.moments, "outlines", self.moments)
        return outlines

    def without_weights(self) -> Statistics:
        """The same without what was worked out from the weights of the network that was run.

        Whoever brings statistics may bring a network that has been trained on since.
        """
        moments = self.moments
        if isinstance(moments, dict):  # those that wait on the disk have left it behind already
            moments = {name: replace(own, mixed=None) for name, own in moments.items()}
        return replace(self, moments=moments, orders={}, totals={})

    def to(self, device: torch.device | str) -> Statistics:
        """The same on another device."""
        moved = {
            name: Moments(m.mean.to(device), m.covariance.to(device), m.taps, m.spatial, m.columns)
            for name, m in self.moments.items()
        }
        products = {
            name: ProductMoments(*(x.to(device) for x in (p.gram, p.query, p.key)))
            for name, p in self.products.items()
        }
        return Statistics(moved, self.source, self.seconds, self.fallbacks, products=products)

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file, atomically."""
        parts: dict[str, Tensor] = {}
        for name, m in self.moments.items():
            for key in ("mean", "covariance", "spatial", "columns"):
                value = getattr(m, key)
                if value is not None:
                    parts[f"{name}|{key}"] = value
        for name, p in self.products.items():
            parts |= {f"{name}|{key}": getattr(p, key) for key in PRODUCTS}
        taps = {name: m.taps for name, m in self.moments.items()}
        notes = {"source": self.source, "taps": json.dumps(taps), "format": FORMAT}
        notes["fallbacks"] = json.dumps([[note.layer, note.text] for note in self.fallbacks])
        write_tensors(Path(path), parts, notes)

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read what `save` wrote."""
        if not Path(path).is_file():
            raise LbylError(f"no statistics file at {path}")
        stored, notes = read_tensors(Path(path), DAMAGED)
        if notes.get("format") != FORMAT:
            raise LbylError(f"{path} holds no statistics of lbyl")
        try:
            return _parsed(stored, notes)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LbylError(f"{path} {DAMAGED}: {error!r}") from error


def _parsed(stored: Mapping[str, Tensor], notes: Mapping[str, str]) -> Statistics:
    """Statistics from the tensors of a file, which are named "layer|part"."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in stored.items():
        name, _, part = key.rpartition("|")
        parts.setdefault(name, {})[part] = value
    taps = json.loads(notes["taps"])
    moments = {
        name: Moments(
            tensors["mean"],
            tensors["covariance"],
            taps[name],
            tensors.get("spatial"),
            tensors.get("columns"),
        )
        for name, tensors in parts.items()
        if name in taps
    }
    products = {
        name: ProductMoments(*(tensors[key] for key in PRODUCTS))
        for name, tensors in parts.items()
        if name not in taps
    }
    fallbacks = tuple(map(_note, json.loads(notes.get("fallbacks", "[]"))))
    return Statistics(moments, notes["source"], fallbacks=fallbacks, products=products)


def _note(stored: Any) -> Note:
    """A layer and what was done there; version 0.3 stored both as one line."""
    return Note(*stored) if isinstance(stored, list) else Note.read(stored)
