"""Compares values: a cut network with the original in which the pruned channels are silenced.

A trial cut shows where channels go. It does not show what a network computes with their
number: `h / h.shape[1] ** 0.5` runs at every width and gives another result at each. So both
networks run on the example: one cut, one whole whose consumers multiply pruned channels by zero.
Their outputs are equal but for rounding, or the cut is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from lbyl.errors import LbylError
from lbyl.graph.unit import Graph, Unit
from lbyl.runtime.format import first_line
from lbyl.runtime.intercept import Function, Interceptor, changes_in_place
from lbyl.runtime.run import Inputs, call_model, dense, device_of, evaluation_mode, tensors_in
from lbyl.runtime.tensors import tensors
from lbyl.surgery.cut import copy_model, cut_for_trial
from lbyl.surgery.indices import Kept, complete, kept_along, kept_mask

ROUNDING = {torch.float64: 1e-10, torch.float32: 3e-5}  # of a whole network,
ROUGH = 1e-2  # and in half precision
CLEAR = {torch.float64: 1e-7, torch.float32: 1e-3}  # what rounding does not explain
SHAKEN = {torch.float64: 1e-12, torch.float32: 1e-6}  # weights are, to see what rounding does
# Times what shaken weights change: more than that is no rounding.
AMPLIFIED = {torch.float64: 1e3, torch.float32: 1e2}
WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
HUGE = 1e30  # what masks are filled with
FEW = 2  # examples of a batch that are compared

LEAVES = ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__")
NORMS = ("layer_norm", "rms_norm")
DRAWS = re.compile(
    r"(rand|randn|randint|randperm|rand_like|randn_like|randint_like|normal|bernoulli|multinomial"
    r"|uniform|exponential|cauchy|geometric|log_normal|poisson|random|standard_gamma|binomial)_?"
)


class Wide(Interceptor):
    """Keeps all numbers of a network double that was made so, whatever its code casts them to."""

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if changes_in_place(name, kwargs):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16"):
            func = Tensor.double
        out = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        return _widened(out) if isinstance(out, Tensor) else out


def _widened(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype in WIDE:
        return x.to(WIDE[x.dtype])
    return WIDE.get(x, x) if isinstance(x, torch.dtype) else x


class Still(Interceptor):
    """Draws nothing at random: fewer numbers are drawn once a network is cut, and so others.

    It keeps the numbers that a comparison of outputs would not see: those that become decisions,
    integers or Python's numbers, and the last that were computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Tensor] = []
        self.last: Tensor | None = None

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if "dropout" in name and (args or "input" in kwargs):
            return args[0] if args else kwargs["input"]
        out = func(*args, **kwargs)
        if DRAWS.fullmatch(name) and isinstance(out, Tensor):
            return out.fill_(0.5)
        if isinstance(out, Tensor) and _is_number(out):
            self.last = out
        elif name in LEAVES or isinstance(out, Tensor):
            self.left += [x for x in args if isinstance(x, Tensor) and _is_number(x)]
        return out


@dataclass(frozen=True)
class Mask:
    """What stays along an axis of a parameter."""

    axis: int
    flags: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return x * self.flags.to(x.device).reshape(shape)


class Silenced(Still):
    """Runs a network whose parameters are masked, and norms over the channels that stay."""

    def __init__(
        self, graph: Graph, kept: Kept, state: Mapping[str, Tensor], shaken: float
    ) -> None:
        super().__init__()
        self.shaken = 1 + shaken
        self.masks = {id(state[n]): masks for n, masks in silencing_masks(graph, kept).items()}
        self.norms: dict[int, Tensor] = {}  # over channels of which some went: which stay
        mask = kept_mask(graph, kept)
        for norm in graph.channel_norms:
            flags = mask[graph.axes[norm.weight, 0]]
            if not bool(flags.all()):
                self.norms[id(state[norm.weight])] = flags

    def on_call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or not (self.masks or self.norms):
            return super().on_call(func, args, kwargs)
        if name in NORMS and self.norms:
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            if id(weight) in self.norms:
                return self._norm(func, args, kwargs, self.norms[id(weight)])
        if name == "mean" and self.norms and isinstance(args[0], Tensor):
            return func(*args, **kwargs) * self._more(args[0])
        args, kwargs = tree_map_only(Tensor, self._masked, (args, kwargs))
        return super().on_call(func, args, kwargs)

    def _masked(self, x: Tensor) -> Tensor:
        masks = self.masks.get(id(x), ())
        for mask in masks:
            x = mask(x)
        return x * self.shaken if masks else x

    def _more(self, x: Tensor) -> float:
        """By what a mean over the channels that stay is more than one over all.

        It is that of a norm written out if nothing is in the channels that went.
        """
        for flags in self.norms.values():
            if x.dim() and len(flags) == x.shape[-1]:
                gone = x[..., ~flags.to(x.device)]
                if not bool(gone.any()):
                    return len(flags) / int(flags.sum())
        return 1.0

    def _norm(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], flags: Tensor
    ) -> Tensor:
        """A norm over the last dimension that knows only the channels that stay."""
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        given = dict(zip(names, args)) | kwargs
        places = torch.nonzero(flags).reshape(-1).to(given["input"].device)
        x = given["input"].index_select(-1, places)
        for name in ("weight", "bias"):
            if isinstance(given.get(name), Tensor):
                given[name] = given[name].index_select(0, places)
        rest = {k: v for k, v in given.items() if k not in ("input", "normalized_shape")}
        y: Tensor = func(x, (len(places),), **rest)
        return torch.zeros_like(given["input"], dtype=y.dtype).index_copy(-1, places, y)


def silencing_masks(graph: Graph, kept: Kept) -> dict[str, list[Mask]]:
    """Parameters that are masked so that nothing hears a pruned channel, and how.

    Those are the columns of consumers. Of queries and keys, which none reads, and of channels that
    a norm hears all together nothing is written into them either: rows are zero.
    """
    read = {(c.weight, c.axis) for c in graph.consumers.values()}
    norms = {norm.weight for norm in graph.channel_norms}
    heard = {u.name for u in graph.units if u.kind == "qk"}
    heard |= {u.name for n in norms for u in graph.units_of.get((n, 0), ())}
    made: dict[str, list[Mask]] = {}
    every = kept_mask(graph, kept)
    unread = kept_mask(graph, {name: k for name, k in kept.items() if name in heard})
    for (name, axis), channel in graph.axes.items():
        mask = every if (name, axis) in read else unread
        flags = kept_along(channel, mask)
        if name not in norms and not bool(flags.all()):
            made.setdefault(name, []).append(Mask(axis, flags))
    return made


@dataclass
class Exactness:
    """Asks whether a cut network computes what the silenced original does."""

    model: nn.Module
    inputs: Inputs
    graph: Graph
    _double: list[tuple[nn.Module, Inputs]] = field(default_factory=list, repr=False)

    @cached_property
    def _example(self) -> Inputs:
        """A few examples of the batch, none of which is one number everywhere."""
        device, batch = device_of(self.model), self.graph.batch
        given = tree_map_only(Tensor, lambda x: x.to(device), self.inputs)
        changed = tree_map_only(Tensor, varied, given)
        few = tree_map_only(
            Tensor, lambda x: x[:FEW] if x.dim() and len(x) == batch else x, changed
        )
        whole = self._made(changed)
        if whole is None or not all(bool(x.isfinite().any()) for x in whole):
            return given
        some = self._made(few) if batch > FEW else None
        alone = some is not None and distance([x[:FEW] for x in whole if x.dim()], some) < ROUGH
        return few if alone else changed  # what examples do to each other shows in all of them

    def _made(self, inputs: Inputs) -> list[Tensor] | None:
        """Outputs; None where the network does not take so many examples, or such numbers."""
        try:
            return run(copy_model(self.model, parameters=False), inputs, Still()).outputs
        except Exception:
            return None

    def wrong(self, kept: Kept) -> set[str]:
        """Units whose cut changes what is computed; all of them where none does so alone."""
        names = [n for n in kept if len(kept[n]) < self.graph[n].channels]
        if not names or not self.differs({n: kept[n] for n in names}):
            return set()
        return self._culprits(names, kept) or set(names)

    def _culprits(self, names: Sequence[str], kept: Kept) -> set[str]:
        """Halve until single units are left."""
        if len(names) == 1:
            return set(names)
        half = len(names) // 2
        found: set[str] = set()
        for part in (names[:half], names[half:]):
            if self.differs({n: kept[n] for n in part}):
                found |= self._culprits(part, kept)
        return found

    def differs(self, kept: Kept) -> bool:
        """Whether the network with these channels kept computes something else."""
        off = self._off(self.model, self._example, kept)
        rounding = ROUNDING.get(precision(self.model), ROUGH)
        return off > rounding and self._confirmed(kept, off)

    def _confirmed(self, kept: Kept, off: float) -> bool:
        """In float64, where the network runs in it: rounding does not make the difference there."""
        model, inputs = self.model, self._example
        try:
            self._double = self._double or [_in_double(model, inputs)]
            found = self._off(*self._double[0], kept)
            if found < float("inf"):
                (model, inputs), off = self._double[0], found
        except Exception:  # some code asks for one precision
            pass
        kind = precision(model)
        if off <= CLEAR.get(kind, ROUGH):
            return False
        shaken = SHAKEN.get(kind, 1e-3)
        before, after = (self._reference(model, inputs, kept, by) for by in (0.0, shaken))
        return off > AMPLIFIED.get(kind, 10) * before.distance(after)

    def _off(self, model: nn.Module, inputs: Inputs, kept: Kept) -> float:
        """How far the cut network is from the silenced one."""
        reference = self._reference(model, inputs, kept)
        try:
            made = run(cut_for_trial(model, self.graph, kept), inputs, Still())
        except Exception:  # it does not run: whatever it says, it is no smaller original
            return float("inf")
        return reference.distance(made, any(self.graph[n].attention is not None for n in kept))

    def _reference(
        self, model: nn.Module, inputs: Inputs, kept: Kept, shaken: float = 0.0
    ) -> Values:
        twin = copy_model(model, parameters=False)  # what it keeps on itself stays out of `model`
        return run(twin, inputs, Silenced(self.graph, kept, tensors(twin), shaken))


@torch.no_grad()
def check_runs(slim: nn.Module, inputs: Inputs, graph: Graph, kept: Kept) -> None:
    """One clear error where a slim network does not run as the original does on the example."""
    wrong = "the smaller network is not returned, for on the example inputs it"
    remedy = "leave layers out with exclude= until it does, and report this as a defect"
    try:
        device = device_of(slim)
        inputs = tree_map_only(Tensor, lambda x: x.to(device), inputs)
        with evaluation_mode(slim):
            made = tensors_in(call_model(copy_model(slim, parameters=False), inputs))
    except Exception as error:  # whatever torch, or the network itself, complains of
        raise LbylError(f"{wrong} does not run ({first_line(error)}): {remedy}") from error
    attention = any(graph[name].attention is not None for name in kept)
    given = [(x.shape and torch.Size(max(1, n) for n in x.shape), x.dtype) for x in made]
    if len(made) != len(graph.outputs):
        raise LbylError(f"{wrong} gives {len(made)} tensors, not {len(graph.outputs)}: {remedy}")
    for (shape, dtype), asked in zip(given, graph.outputs):
        # Keys and values that are handed out as a cache lose heads.
        resized = asked.shape is not None and tuple(shape) != asked.shape and not attention
        if dtype != asked.dtype or resized:
            raise LbylError(
                f"{wrong} gives {tuple(shape)} of {dtype}, not {asked.shape} of {asked.dtype}: "
                f"{remedy}"
            )


def some(
    graph: Graph, unit: Unit, width: float = 2 / 3, least: int = 1, others: bool = False
) -> Tensor:
    """An irregular choice of channels to keep, equally many of each block.

    Irregular, so that what only works by symmetry fails. Of each layer two channels stay: one
    alone looks like something that is there once for all. With `others` those stay first that go
    without: channels that are dead tell nothing.
    """
    generator = torch.Generator().manual_seed(unit.channels)
    block = torch.zeros(unit.channels).long() if unit.block is None else unit.block
    kept = []
    for b in range(int(block.max()) + 1):
        members = torch.nonzero(block == b).reshape(-1)
        count = min(len(members), max(least, int(width * len(members) + 1e-9)))
        order = torch.randperm(len(members), generator=generator)
        kept.append(members[order[-count:] if others else order[:count]])
    return complete(graph, unit, torch.cat(kept).sort().values, least=2)


def widths(graph: Graph, units: Sequence[Unit]) -> Iterator[dict[str, Tensor]]:
    """Channels to keep at two widths: most, and few."""
    yield {unit.name: some(graph, unit) for unit in units}
    yield {unit.name: some(graph, unit, 1 / 8, 2, others=True) for unit in units}


@dataclass(frozen=True)
class Values:
    """What a run computes: its outputs, and numbers inside that they may not show."""

    outputs: list[Tensor]
    inside: list[Tensor]

    def distance(self, other: Values, resized: bool = False) -> float:
        """How far outputs are from `other`'s, and numbers inside of one shape.

        Outputs may be `resized`: keys and values that are handed out as a cache lose heads.
        """
        inside = distance(*_of_one_shape(self.inside, other.inside))
        mine, others = self.outputs, other.outputs
        if resized and len(mine) == len(others):
            mine, others = _of_one_shape(mine, others)
        return max(inside, distance(mine, others))


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs, mode: Still) -> Values:
    """Run a network in evaluation mode, with nothing drawn at random."""
    double = precision(model) == torch.float64
    wide: AbstractContextManager[Any] = Wide() if double else nullcontext()
    with evaluation_mode(model), wide, mode:
        output = call_model(model, inputs)
    last = [] if mode.last is None else [mode.last]
    outputs, inside = (
        [dense(x.detach()) for x in xs] for xs in (tensors_in(output), [*mode.left, *last])
    )
    return Values([x for x in outputs if _is_number(x)], inside)


def _is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def varied(x: Tensor) -> Tensor:
    """Random numbers for an example that is one number everywhere: nothing shows in that."""
    if not x.is_floating_point() or x.numel() < 2 or bool((x != x.flatten()[0]).any()):
        return x
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator).to(x)


def _of_one_shape(
    reference: Sequence[Tensor], made: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Pairs of one shape, of those that both have."""
    pairs = [(x, y) for x, y in zip(reference, made) if x.shape == y.shape]
    return [x for x, _ in pairs], [y for _, y in pairs]


def precision(model: nn.Module) -> torch.dtype:
    kinds = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return min(kinds, key=lambda kind: torch.finfo(kind).bits, default=torch.float32)


def _in_double(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    wide = copy_model(model).double()
    return wide, tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def distance(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference of outputs, each relative to its largest entry."""
    if [x.shape for x in reference] != [x.shape for x in other]:
        return float("inf")
    worst = 0.0
    for x, y in zip(reference, other):
        known = x.isfinite() & (x.abs() < HUGE)
        if not torch.equal(known, y.isfinite() & (y.abs() < HUGE)):
            return float("inf")
        x, y = x[known], y[known]
        if x.numel():
            scale = max(float(x.abs().max()), float(y.abs().max()), 1e-30)
            worst = max(worst, float((x - y).abs().max()) / scale)
    return worst
