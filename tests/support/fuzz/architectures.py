"""A random network for every seed: inputs, a body of drawn parts, and heads."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support.fuzz.parts import WIDTHS, Lambda, Size, branch, chain, convolution
from support.networks import randomise

BATCH = 3
SPACES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((),),
    1: ((8,), (12,)),
    2: ((6, 6), (8, 8), (5, 7)),
    3: ((4, 4, 4), (3, 4, 5)),
}
VOCABULARY = 11


@dataclass(frozen=True)
class Drawn:
    """A network and inputs for it."""

    model: nn.Module
    inputs: Any


def draw(seed: int) -> Drawn:
    """The network of this seed, in evaluation mode and float64; the caller's RNG is not touched."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = _draw(rng)
    return Drawn(reset(drawn.model, seed), drawn.inputs)


def reset(model: nn.Module, seed: int) -> nn.Module:
    """All weights drawn anew."""
    return randomise(model.double(), seed).eval()


def _draw(rng: random.Random) -> Drawn:
    if rng.random() < 0.12:
        return _text(rng)
    dims = rng.choices((0, 1, 2, 3), (2, 3, 6, 1))[0]
    size = Size(rng.choice((3, 4, 6, 12) if dims == 0 else (1, 3, 4)), rng.choice(SPACES[dims]))
    network = Network(rng, size)
    x = torch.randn(BATCH, size.channels, *size.space).double()
    if network.second == "none":
        return Drawn(network, x)
    other = torch.randn(BATCH, 5).double() if network.second == "condition" else torch.randn_like(x)
    return Drawn(network, {"x": x, "other": other} if rng.random() < 0.5 else (x, other))


class Network(nn.Module):
    """Two bodies one behind the other, with a second input between them, and some heads."""

    def __init__(self, rng: random.Random, size: Size) -> None:
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

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        made = self.start(x)
        if self.second == "image":
            if self.beside is not None:
                made = made + self.beside(other)
            else:
                made = (
                    made
                    + self.stem(other)
                    .flatten(2)
                    .mean(2)
                    .reshape(*made.shape[:2], *[1] * (made.dim() - 2))
                    if made.dim() > 2
                    else made + self.stem(other)
                )
        elif self.second == "condition":
            scale, shift = self.condition(other).chunk(2, 1)
            ones = [1] * (made.dim() - 2)
            made = made * scale.reshape(*scale.shape, *ones) + shift.reshape(*shift.shape, *ones)
        early = None if self.early is None else self.early(made.clone())
        out = self.head(self.end(made))
        if early is None:
            return out
        return {"tuple": (out, early), "list": [out, early], "dict": {"a": out, "b": early}}[
            self.form
        ]


def _head(rng: random.Random, size: Size) -> nn.Module:
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

    def __init__(self, rng: random.Random, length: int) -> None:
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


def _text(rng: random.Random) -> Drawn:
    length = rng.choice((6, 9))
    return Drawn(Text(rng, length), torch.randint(VOCABULARY, (BATCH, length)))
