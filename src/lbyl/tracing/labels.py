"""Which positions of which tensors are one channel.

What the design must satisfy: the answer is exact or "unprunable", for any architecture. Every
index of every parameter axis is an *atom*. Each value of the recorded run carries, for each of its
entries, the atom that made it (a label); labels travel through data-moving calls by the very same
call that moved the data. Where two channels meet entry by entry they are *tied*; where a channel
is mixed with others in a way that cannot be undone it is *pinned*, with the reason. A channel of
the network is then a connected set of atoms: it goes or stays as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lbyl.graph.unit import Axis, Layer, Norm
from lbyl.tracing.record import Call, Record

FIXED = 0
"""The label of entries that no prunable channel made: inputs, constants."""

_FIXED = torch.tensor(FIXED)

FEW = 4096  # pairs of labels, among which it does not pay to look for equal ones


@dataclass(frozen=True)
class Pinned:
    """For every class the index of its reason in a list, −1 where it is not pinned."""

    first: Tensor
    reasons: list[str]

    def unpinned(self, channels: Tensor) -> Tensor:
        """Those of the given channels that are not pinned."""
        return channels[self.first[channels] < 0]

    def reason(self, channels: Tensor) -> str | None:
        """The reason of the first pinned one of the given channels, None where none is pinned."""
        indices = self.first[channels]
        indices = indices[indices >= 0]
        return self.reasons[int(indices[0])] if len(indices) else None


class Atoms:
    """Numbers the indices of parameter axes, and keeps the ties and pins between them.

    What is tied and pinned is only written down while calls are followed and looked at together
    when somebody asks: thousands of small pieces cost more than one large.
    """

    def __init__(self) -> None:
        self.axes: dict[Axis, Tensor] = {}
        self.count = 1
        self._reasons: list[str] = []  # of every tie and pin, in order
        self._met: list[tuple[int, Tensor, Tensor, bool]] = []  # ties not looked at yet
        self._pins: list[tuple[Tensor, Tensor]] = []  # atoms, and the index of each one's reason
        self._ties: list[Tensor] = []
        self._added: list[Tensor] = []
        self._classes: tuple[tuple[int, int], Tensor] | None = None  # as of so many atoms and ties

    def axis(self, name: str, axis: int, size: int) -> Tensor:
        """The atoms along one axis of a parameter."""
        if (name, axis) not in self.axes:
            self.axes[name, axis] = torch.arange(self.count, self.count + size)
            self.count += size
        return self.axes[name, axis]

    def axes_with(self, marked: Tensor) -> list[Axis]:
        """The axes that hold any of the atoms marked."""
        parts = marked[1:].split([len(atoms) for atoms in self.axes.values()])  # axis by axis
        return [axis for axis, part in zip(self.axes, parts) if part.numpy().any()]

    def tie(self, a: Tensor, b: Tensor, reason: str, added: bool = False) -> None:
        """Atoms at equal positions are one channel; what meets a fixed entry is pinned."""
        a, b = paired(a, b)
        if len(a) > FEW:
            a, b = distinct_pairs(a, b, self.count)
        self._met.append((len(self._reasons), a, b, added))
        self._reasons.append(reason)

    def pin(self, atoms: Tensor, reason: str) -> None:
        """These atoms must stay; the first reason given is the one reported."""
        atoms = constant_dropped(atoms).reshape(-1)
        atoms = distinct(atoms) if len(atoms) > FEW else atoms
        self._pins.append((atoms, torch.full_like(atoms, len(self._reasons))))
        self._reasons.append(reason)

    def _look(self) -> None:
        """Sort what has met into ties, and pins where one side was fixed."""
        if not self._met:
            return
        numbers, several_a, several_b, _ = zip(*self._met)
        pairs = torch.stack([torch.cat(several_a), torch.cat(several_b)])
        fixed = (pairs == FIXED).any(0)
        if bool(fixed.any()):
            lengths = torch.tensor([len(a) for a in several_a])
            reason = torch.repeat_interleave(torch.tensor(numbers), lengths)[fixed]
            self._pins += [(side[fixed], reason) for side in pairs]
            pairs = pairs[:, ~fixed]
        if pairs.numel():
            self._ties.append(pairs)
        for _, a, b, added in self._met:
            if added:
                summed = (a != FIXED) & (b != FIXED) & (a != b)
                self._added += [a[summed], b[summed]]
        self._met = []

    def pinned(self, classes: Tensor) -> Pinned:
        """Which channels have a pinned atom, and the first reason given."""
        self._look()
        never = len(self._reasons)
        first = torch.full((self.count,), never)
        if self._pins:
            atoms, reason = (torch.cat(parts) for parts in zip(*self._pins))
            free = atoms != FIXED
            first.scatter_reduce_(0, classes[atoms[free]], reason[free], "amin")
        return Pinned(torch.where(first == never, -1, first), self._reasons)

    def classes(self) -> Tensor:
        """For every atom the smallest atom it is tied to, directly or through others."""
        self._look()
        known = (self.count, len(self._ties))
        if self._classes is None or self._classes[0] != known:
            self._classes = known, connected(self.count, self._ties)
        return self._classes[1]

    def added(self) -> Tensor:
        """Atoms that an addition tied to other atoms: residual sums."""
        self._look()
        return torch.unique(torch.cat(self._added)) if self._added else torch.empty(0).long()


def connected(count: int, pairs: list[Tensor]) -> Tensor:
    """(count,): for every number the smallest one connected to it by the pairs (each (2, n))."""
    root = np.arange(count)
    a, b = torch.cat(pairs, dim=1).numpy() if pairs else (root, root)
    while True:
        one, other = root[a], root[b]
        apart = one != other
        if not apart.any():
            return torch.from_numpy(root)
        a, b, one, other = a[apart], b[apart], one[apart], other[apart]  # the rest stay together
        # Of several numbers that a root could follow any will do: all are smaller, and the others
        # come next time. The smallest of all follows none.
        root[np.maximum(one, other)] = np.minimum(one, other)
        while not np.array_equal(further := root[root], root):
            root = further


@dataclass
class Flow:
    """Labels of every value while the recorded calls are followed in order."""

    record: Record
    atoms: Atoms = field(default_factory=Atoms)
    labels: dict[int, Tensor] = field(default_factory=dict)
    # The dimensions along which labels change, by the labels' id; they are held, so that it stays.
    _dims: dict[int, tuple[Tensor, list[int]]] = field(default_factory=dict, repr=False)
    layers: list[Layer] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    constants: set[int] = field(default_factory=set)  # values made of parameters alone
    grouped: set[str] = field(default_factory=set)  # weights that count as grouped with one left
    blank: set[int] = field(default_factory=set)  # values that hold one number everywhere
    accounted: set[tuple[int, int]] = field(default_factory=set)  # (call, matrix) a rule explains
    refused: dict[str, str] = field(default_factory=dict)  # layers that are none → why
    residual: bool = False  # whether norms and tables may lose channels of the residual stream
    # Norms over channels: weight, bias, whether centred, what comes out, what is added to weight.
    channel_norms: list[tuple[str, str | None, bool, int, float]] = field(default_factory=list)
    tables: set[str] = field(default_factory=set)  # of embeddings, cut by column
    unreached: list[str] = field(default_factory=list)  # parameters that no run has read
    fixed_macs: int = 0  # of products between activations, which pruning here never changes

    def shape(self, value: int) -> torch.Size:
        """The shape of a value in the recorded run."""
        return self.record.shapes[value]

    def shape_of(self, parameter: str) -> torch.Size:
        """The shape of a parameter by its name."""
        return self.shape(self._values[parameter])

    @cached_property
    def _values(self) -> dict[str, int]:
        return {name: value for value, name in self.record.parameters.items()}

    @cached_property
    def users(self) -> dict[int, list[tuple[int, Call]]]:
        """For every value the calls that read it, each with its index in the record."""
        users: dict[int, list[tuple[int, Call]]] = {}
        for index, call in enumerate(self.record.calls):
            for value in dict.fromkeys(call.inputs):
                users.setdefault(value, []).append((index, call))
        return users

    @cached_property
    def maker(self) -> dict[int, Call]:
        """The call that made each value."""
        return {value: call for call in self.record.calls for value in call.outputs}

    @cached_property
    def norm_at(self) -> dict[int, Norm]:
        """The first BatchNorm that reads a value; asked for when all calls were followed."""
        return {norm.value_in: norm for norm in reversed(self.norms)}

    @cached_property
    def weight_of(self) -> dict[str, str]:
        """The name of every layer's weight."""
        return {c.name: c.weight for c in self.layers}

    @cached_property
    def ends(self) -> set[int]:
        """The ids of calls of layers that read channels one by one."""
        return {c.call for c in self.layers if c.weight not in self.grouped}

    def of(self, value: int) -> Tensor:
        """The labels of a value; parameters are labelled along their only long axis."""
        if value not in self.labels:
            self.labels[value] = self._initial(value)
        return self.labels[value]

    def give(self, value: int, labels: Tensor) -> None:
        """Keep the labels of a value, in a form that stores nothing along constant dimensions."""
        if id(labels) not in self._dims:
            dims = varying(labels)
            labels = _laid_along(labels, dims).expand(self.shape(value))
            self._dims[id(labels)] = labels, dims
        self.labels[value] = labels

    def dims(self, value: int) -> list[int]:
        """The dimensions along which the labels of a value change."""
        labels = self.of(value)
        known = self._dims.get(id(labels))
        if known is None:
            known = self._dims[id(labels)] = labels, varying(labels)
        return known[1]

    def marked(self, value: int) -> bool:
        """Whether any entry of a value carries a channel."""
        if self.dims(value):
            return True
        labels = self.of(value)
        return bool(labels.numel()) and int(labels[(0,) * labels.dim()]) != FIXED

    def _initial(self, value: int) -> Tensor:
        shape = self.shape(value)
        name = self.record.parameters.get(value)
        long_axes = [d for d, size in enumerate(shape) if size > 1]
        if name is not None and len(long_axes) == 1:
            return self.along(self.atoms.axis(name, long_axes[0], shape[long_axes[0]]), value)
        return self.fixed(value)

    def fixed(self, value: int) -> Tensor:
        """Labels for a value none of whose entries carries a channel."""
        return fixed_labels(self.shape(value))

    def along(self, atoms: Tensor, value: int, dim: int | None = None) -> Tensor:
        """Atoms laid along one dimension of a value (its only long one), constant elsewhere."""
        shape = self.shape(value)
        if len(shape) == 1 and len(atoms) == shape[0]:
            return atoms
        if dim is None:
            dim = next(d for d, size in enumerate(shape) if size > 1)
        view = [1] * len(shape)
        view[dim] = -1
        return atoms.reshape(view).expand(shape)

    def vector(self, value: int, dim: int, reason: str) -> Tensor:
        """The labels along `dim`; pinned and fixed where they differ elsewhere too."""
        labels = self.of(value)
        dim %= labels.dim()
        others = [d for d in self.dims(value) if d != dim]
        if others:
            self.atoms.pin(labels, reason)
            return torch.full((labels.shape[dim],), FIXED)
        return select_first(labels, dim)

    def pin_all(self, values: Iterable[int], reason: str) -> None:
        """Pin whatever these values are made of, parameters with all their axes."""
        for value in values:
            name = self.record.parameters.get(value)
            if name is not None:
                for axis, size in enumerate(self.shape(value)):
                    self.atoms.pin(self.atoms.axis(name, axis, size), reason)
            else:
                self.atoms.pin(self.of(value), reason)


def fixed_labels(shape: torch.Size) -> Tensor:
    """Labels of this shape, none of which is a channel."""
    return _FIXED.expand(shape)


def distinct(numbers: Tensor) -> Tensor:
    """Each number once, ascending; labels are long runs of equal ones, which need no sorting."""
    return torch.unique(torch.unique_consecutive(numbers.reshape(-1)))


def paired(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) each: entries at equal positions, one along each dimension that both are constant along.

    One of the two may be broadcast.
    """
    if a.dim() == 1 and a.shape == b.shape:
        return a, b
    a, b = torch.broadcast_tensors(a, b)
    for d, size in enumerate(a.shape):
        if size > 1 and a.stride(d) == 0 and b.stride(d) == 0:
            a, b = a.narrow(d, 0, 1), b.narrow(d, 0, 1)
    return a.reshape(-1), b.reshape(-1)


def distinct_pairs(a: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each pair of entries, all of them less than `count`, once."""
    codes = distinct(a * count + b)  # unique numbers are found much faster than unique columns
    return codes // count, codes % count


def varying(labels: Tensor) -> list[int]:
    """The dimensions along which labels change."""
    entries: Any = labels.numpy()  # the same memory; small pieces of it are looked at much faster
    if not entries.size:
        return []
    sizes = zip(entries.shape, entries.strides)
    loose = [d for d, (size, stride) in enumerate(sizes) if size > 1 and stride]
    entries = entries[tuple(slice(None) if d in loose else 0 for d in range(entries.ndim))]
    found: list[int] = []
    for d in loose:
        axis = len(found)
        first, last = entries.take(0, axis), entries.take(-1, axis)
        # The last differs from the first nearly always where any does, and is found at once.
        if (first == last).all() and (entries == np.expand_dims(first, axis)).all():
            entries = first  # along the others there is so much less to look at
        else:
            found.append(d)
    return found


def constant_dropped(labels: Tensor) -> Tensor:
    """One entry along each dimension that is constant by its stride, to look at less."""
    for d, (size, stride) in enumerate(zip(labels.shape, labels.stride())):
        if size > 1 and stride == 0:
            labels = labels.narrow(d, 0, 1)
    return labels


def select_first(labels: Tensor, dim: int) -> Tensor:
    """The labels along `dim` at position 0 of all other dimensions."""
    return labels.as_strided((labels.shape[dim],), (labels.stride(dim),))


def same_channels(labels: Tensor, shape: torch.Size, dims: list[int]) -> Tensor:
    """The channels along `dims` laid over another shape of the same rank."""
    for d in range(labels.dim()):
        if d not in dims:
            labels = labels.narrow(d, 0, 1)
    return labels.expand(shape)


def compact(labels: Tensor) -> Tensor:
    """Equal labels in a form that stores nothing along constant dimensions."""
    return _laid_along(labels, varying(labels))


def _laid_along(labels: Tensor, dims: list[int]) -> Tensor:
    """Labels that change along these dimensions only, with one entry along each other."""
    for d, size in enumerate(labels.shape):
        if size > 1 and d not in dims:
            labels = labels.narrow(d, 0, 1)
    return labels
