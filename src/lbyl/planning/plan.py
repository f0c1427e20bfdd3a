"""A plan: which channels are kept. Pure data, made before anything is cut, and kept as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lbyl.errors import LbylError
from lbyl.graph.unit import Graph

VERSION = 2


@dataclass(frozen=True)
class Plan:
    """Unit → kept channels, and who chose them."""

    kept: Mapping[str, Tensor]
    channels: Mapping[str, int]
    criterion: Mapping[str, Any] = field(default_factory=dict)  # that chose, if one did
    method: Mapping[str, Any] = field(default_factory=dict)  # that chose by itself, if one did

    @property
    def chosen_by(self) -> str | None:
        """The name of the criterion or method that chose; None for a plan made by hand."""
        return (self.criterion or self.method).get("name")

    @cached_property
    def pruned(self) -> dict[str, Tensor]:
        """Unit → kept channels, of units that lose any."""
        return {n: kept for n, kept in self.kept.items() if len(kept) < self.channels[n]}

    def then(self, later: Plan) -> Plan:
        """This plan and one of the network it made, as a single plan of the original."""
        kept, channels = dict(self.kept), dict(self.channels)
        for name, indices in later.kept.items():
            here = kept.get(name)
            if here is not None and len(here) != later.channels[name]:
                raise LbylError(
                    f"the later plan expects {later.channels[name]} channels in {name!r}, and "
                    f"{len(here)} were kept: it belongs to another network"
                )
            kept[name] = indices if here is None else here[indices.to(here.device)]
            channels.setdefault(name, later.channels[name])
        return Plan(kept, channels, later.criterion, later.method)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "criterion": dict(self.criterion),
            "method": dict(self.method),
            "units": {
                name: {"channels": self.channels[name], "kept": indices.tolist()}
                for name, indices in self.kept.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """A plan from JSON, checked field by field."""
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            version = data.get("version") if isinstance(data, Mapping) else type(data).__name__
            raise LbylError(f"this plan has version {version!r}; this lbyl reads version {VERSION}")
        units = data.get("units")
        if not isinstance(units, Mapping):
            raise LbylError("the plan has no 'units': it is not a plan of lbyl")
        kept: dict[str, Tensor] = {}
        for name, entry in units.items():
            kept[name] = _indices(name, entry)
        sizes = {name: entry["channels"] for name, entry in units.items()}
        choices = [data.get(key, {}) for key in ("criterion", "method")]
        if not all(isinstance(choice, Mapping) for choice in choices):
            raise LbylError("the plan's 'criterion' and 'method' must be objects with a name")
        return cls(kept, sizes, *choices)

    def check(self, graph: Graph) -> None:
        """One clear error where a plan does not belong to the model."""
        known = {unit.name: unit.channels for unit in graph.units}
        for name in self.kept.keys() ^ self.channels.keys():
            raise LbylError(f"the plan is incomplete: {name!r} needs 'kept' and 'channels'")
        for name, channels in self.channels.items():
            if name not in known and name in graph.unprunable:
                raise LbylError(
                    f"the plan prunes {name!r}, which is unprunable in this model: "
                    f"{graph.unprunable[name]}; or the plan belongs to another model"
                )
            if name not in known:
                raise LbylError(
                    f"the plan prunes {name!r}, which this model does not have: the plan belongs "
                    "to another model"
                )
            if known[name] != channels:
                raise LbylError(
                    f"the plan expects {channels} channels in {name!r}, this model has "
                    f"{known[name]}: the plan belongs to another model"
                )
            # A plan made by hand has not come through `from_dict`.
            kept = _indices(name, {"channels": channels, "kept": _listed(self.kept[name])})
            for (parameter, _), part in graph.parts.get(name, {}).items():
                if not bool(torch.isin(part, kept).any()):
                    raise LbylError(
                        f"the plan for {name!r} leaves {parameter} without any channel: keep at "
                        f"least one of {_briefly(part)}"
                    )


def _briefly(channels: Tensor) -> str:
    few = ", ".join(map(str, channels[:4].tolist()))
    return few if len(channels) <= 4 else f"{few}, …"


def _listed(kept: Any) -> Any:
    return kept.tolist() if isinstance(kept, Tensor) and not kept.is_floating_point() else None


def _indices(name: str, entry: Any) -> Tensor:
    if not isinstance(entry, Mapping) or not {"channels", "kept"} <= entry.keys():
        raise LbylError(f"the plan's entry for {name!r} needs 'channels' and 'kept'")
    values, channels = entry["kept"], entry["channels"]
    whole = isinstance(values, list) and all(type(i) is int for i in [channels, *values])
    if not whole or not values or sorted(set(values)) != values:
        raise LbylError(f"the plan's 'kept' for {name!r} must be ascending whole numbers")
    if values[0] < 0 or values[-1] >= channels:
        raise LbylError(f"the plan keeps channels of {name!r} outside 0…{channels - 1}")
    return torch.tensor(values, dtype=torch.long)
