"""A random network for every seed: inputs, a body of drawn parts, and heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from support.fuzz.parts import WIDTHS, Lambda, Rng, Size, branch, chain, convolution, seeded
from support.fuzz.parts import Drawn as Part
from support.fuzz.unusual import GROUPS, unusual
from support.networks import randomise

BATCH = 3
SPACES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((),),
    1: ((8,), (12,)),
    2: ((6, 6), (8, 8), (5, 7)),
    3: ((4, 4, 4), (3, 4, 5)),
}
VOCABULARY = 11
TASKS = 0.12  # networks with a second path that an argument chooses
USUAL = frozenset(GROUPS)  # left out, nothing unusual is left


@dataclass(frozen=True)
class Drawn:
    """A network, the inputs that it is traced with, and others that it takes as well."""

    model: nn.Module
    each: tuple[Any, ...]  # an example for each path
    others: tuple[Any, ...] = ()  # which reach what those do not
    elements: tuple[str, ...] = field(default=(), repr=False)  # what was drawn

    @property
    def inputs(self) -> Any:
        """Example inputs as a caller gives them."""
        return self.each[0] if len(self.each) == 1 else iter(self.each)


def draw(seed: int, without: Collection[str] = ()) -> Drawn:
    """The network of this seed, in evaluation mode and float64; the caller's RNG is not touched.

    `without` names groups of unusual parts that are left out; everything else is drawn alike.
    """
    rng = seeded(seed)
    rng.without = frozenset(without)
    aside = seeded(f"unusual {seed}")
    rng.unusual = lambda rng, size: _allowed(rng, unusual(_own(aside), size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = _draw(rng, _own(aside))
    others = (*drawn.others, *(_mirrored(each) for each in drawn.each))
    elements = tuple(dict.fromkeys(rng.drawn))
    return Drawn(reset(drawn.model, seed), drawn.each, others, elements)


def _own(aside: Rng) -> Rng:
    """Random numbers for one place, as many as it takes: what comes later does not change."""
    return seeded(aside.random())


def _allowed(rng: Rng, made: tuple[str, Part] | None) -> tuple[str, Part] | None:
    return None if made is None or made[0].split()[0] in rng.without else made


def _mirrored(inputs: Any) -> Any:
    """Fewer examples, and of the other sign: other branches run."""
    some = tree_map_only(Tensor, lambda x: x[:2], inputs)
    return tree_map_only(Tensor, lambda x: -x if x.is_floating_point() else x, some)


def reset(model: nn.Module, seed: int) -> nn.Module:
    """All weights drawn anew."""
    return randomise(model.double(), seed).eval()


def _draw(rng: Rng, aside: Rng) -> Drawn:
    if rng.random() < 0.12:
        rng.drawn.append("text")
        return _text(rng)
    dims = rng.choices((0, 1, 2, 3), (2, 3, 6, 1))[0]
    size = Size(rng.choice((3, 4, 6, 12) if dims == 0 else (1, 3, 4)), rng.choice(SPACES[dims]))
    network = Network(rng, size)
    x = torch.randn(BATCH, size.channels, *size.space).double()
    drawn = Drawn(network, (x,))
    if network.second != "none":
        other = (
            torch.randn(BATCH, 5).double() if network.second == "condition" else torch.randn_like(x)
        )
        named = rng.random() < 0.5
        drawn = Drawn(network, ({"x": x, "other": other} if named else (x, other),))
        if aside.random() < 0.3 and "path" not in rng.without:
            rng.drawn.append("path second input")
            drawn = Drawn(network, (x,), drawn.each)
    if aside.random() < TASKS and "path" not in rng.without:
        return _with_tasks(rng, aside, network, drawn)
    return drawn


def _with_tasks(rng: Rng, aside: Rng, network: Network, drawn: Drawn) -> Drawn:
    """A second path, which the example reaches or not."""
    kind = aside.choice(("head", "flattened", "middle", "joined", "adapter", "kept", "start"))
    network.add_path(kind, aside)
    rng.drawn.append(f"path {kind}")
    both = [_asked(drawn.each[0], task) for task in (0, 1)]
    others = tuple(_asked(each, task) for each in drawn.others for task in (0, 1))
    if aside.random() < 0.4:
        rng.drawn.append("path examples of both")
        return replace(drawn, each=tuple(both), others=others)
    return replace(drawn, each=(both[0],), others=(both[1], *others))


def _asked(inputs: Any, task: int) -> Any:
    """The inputs, with a path chosen."""
    if isinstance(inputs, dict):
        return {**inputs, "task": task}
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return (*given, *[None] * (2 - len(given)), task)


class Network(nn.Module):
    """Two bodies one behind the other, with a second input between them, and some heads."""

    def __init__(self, rng: Rng, size: Size) -> None:
        super().__init__()
        self.second = rng.choices(("none", "image", "condition"), (6, 1, 1))[0]
        first: Size
        start, first = chain(rng, size, 1, ("layer", "grouped", "functional", "gated", "shared"))
        body, middle = chain(rng, first, rng.randint(0, 2))
        self.start = nn.Sequential(start, body)
        if self.second == "image":
            self.beside = self.start if rng.random() < 0.4 else None
            self.stem = convolution(rng, size.dims, size.channels, middle.channels)
        elif self.second == "condition":
            self.condition = nn.Linear(5, 2 * middle.channels)
        self.end, last = chain(rng, middle, rng.randint(0, 2))
        self.early = _head(rng, middle) if rng.random() < 0.25 else None
        self.head = _head(rng, last)
        self.form = rng.choice(("tuple", "list", "dict"))
        self.path = ""
        self.sizes = (size, middle, last)

    def add_path(self, kind: str, rng: Rng) -> None:
        """Layers that run where `task` is 1."""
        size, middle, last = self.sizes
        entries = middle.channels
        for extent in middle.space:
            entries *= extent
        self.path = kind
        if kind == "head":
            self.path_head = _head(rng, last)
        elif kind in ("middle", "kept"):
            self.path_head = _head(rng, middle)
        elif kind == "flattened":
            self.path_head = nn.Sequential(nn.Flatten(), nn.Linear(entries, 2))
        elif kind == "joined":
            self.path_head = nn.Linear(middle.channels + last.channels, 2)
        elif kind == "adapter":
            self.adapter = branch(rng, middle)
        else:
            self.path_start = convolution(rng, size.dims, size.channels, middle.channels)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, other: Tensor | None = None, task: int = 0) -> Any:
        made = self.start(x)
        if other is not None:
            made = self._with(made, other)
        if task and self.path == "adapter":
            made = made + self.adapter(made.clone())
        if task and self.path == "start":
            made = (
                made
                + self.path_start(x)
                .flatten(2)
                .mean(2)
                .reshape(*made.shape[:2], *[1] * (made.dim() - 2))
                if made.dim() > 2
                else made + self.path_start(x)
            )
        if self.path == "kept":
            self.seen = [made]
        early = None if self.early is None else self.early(made.clone())
        last = self.end(made.clone() if self.path else made)
        if task and self.path in ("head", "middle", "flattened", "joined", "kept"):
            return self._answer(made, last)
        out = self.head(last)
        if early is None:
            return out
        return {"tuple": (out, early), "list": [out, early], "dict": {"a": out, "b": early}}[
            self.form
        ]

    def _answer(self, middle: Tensor, last: Tensor) -> Tensor:
        """What the second path gives."""
        if self.path == "joined":
            both = [x.flatten(2).mean(2) if x.dim() > 2 else x for x in (middle, last)]
            return self.path_head(torch.cat(both, 1))
        read = {"head": last, "kept": self.seen[0] if self.seen else last}
        return self.path_head(read.get(self.path, middle))

    def _with(self, made: Tensor, other: Tensor) -> Tensor:
        """The second input added."""
        ones = [1] * (made.dim() - 2)
        if self.second == "condition":
            scale, shift = self.condition(other).chunk(2, 1)
            return made * scale.reshape(*scale.shape, *ones) + shift.reshape(*shift.shape, *ones)
        if self.beside is not None:
            return made + self.beside(other)
        added = self.stem(other)
        return made + (added.flatten(2).mean(2).reshape(*made.shape[:2], *ones) if ones else added)


def _head(rng: Rng, size: Size) -> nn.Module:
    """Classes from pooled or flattened features, or a map of them."""
    outputs = rng.randint(2, 4)
    kind = rng.choice(("pooled", "flat", "map", "hidden")) if size.dims else "vector"
    if kind == "pooled":
        pool = Lambda(lambda x: x.flatten(2).mean(2))
        return nn.Sequential(pool, nn.Linear(size.channels, outputs, bias=rng.random() < 0.7))
    if kind == "flat":
        entries = size.channels
        for extent in size.space:
            entries *= extent
        return nn.Sequential(nn.Flatten(), nn.Linear(entries, outputs))
    if kind == "map":
        return branch(rng, size, outputs)
    hidden = rng.choice(WIDTHS)
    pool = Lambda(lambda x: x.flatten(2).amax(2)) if size.dims else nn.Identity()
    layers = [nn.Linear(size.channels, hidden), nn.ReLU(), nn.Linear(hidden, outputs)]
    return nn.Sequential(pool, *layers)


class Text(nn.Module):
    """Tokens in, scores of every token out, the two matrices tied or not."""

    def __init__(self, rng: Rng, length: int) -> None:
        super().__init__()
        width = rng.choice((4, 6, 8))
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width))
        names = ("feed_forward", "attention", "recurrent", "gated", "layer", "residual")
        self.body, size = chain(rng, Size(width, (length,)), rng.randint(1, 3), names)
        self.norm = nn.LayerNorm(size.channels)
        self.out = nn.Linear(size.channels, VOCABULARY, bias=rng.random() < 0.5)
        if size.channels == width and rng.random() < 0.5:
            self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embedding(tokens) + self.position[: tokens.shape[1]]).transpose(1, 2)
        return self.out(self.norm(self.body(x).transpose(1, 2)[:, : tokens.shape[1]]))


def _text(rng: Rng) -> Drawn:
    length = rng.choice((6, 9))
    return Drawn(Text(rng, length), (torch.randint(VOCABULARY, (BATCH, length)),))
