"""Parts that read the width of what they are given as a number, in as many spellings as code has.

At the full width some compute nothing at all (`x * x.shape[1] / 12` where there are 12 channels):
a single run does not show what they do once a network is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.fuzz.parts import WIDTHS, Drawn, Part, Rng, Size, convolution
from support.fuzz.parts import norm as any_norm


@dataclass(frozen=True)
class Numbers:
    """What a spelling may compare a width with: the whole width, and some other."""

    whole: int
    other: int


def _across(values: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, in the shape of a map."""
    return values.to(x).reshape(-1, *[1] * (x.dim() - 2))


def _tokens(x: Tensor) -> Tensor:
    """(batch, positions, channels); a vector is one position."""
    return x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1)


def _map(tokens: Tensor, x: Tensor) -> Tensor:
    return tokens.transpose(1, 2).reshape(x.shape)


def _summed_in_turn(x: Tensor, n: Numbers) -> Tensor:
    total = torch.zeros_like(x[:, :1])
    for i in range(x.shape[1]):
        total = total + (i + 1) * x[:, i : i + 1]
    return x + 0.1 * total


def _normalised_by_hand(x: Tensor, n: Numbers) -> Tensor:
    mean = x.sum(1, keepdim=True) / x.shape[1]
    return (x - mean) / ((x - mean).square().sum(1, keepdim=True) / x.shape[1] + 1e-2).sqrt()


def _similar(x: Tensor, n: Numbers) -> Tensor:
    tokens = _tokens(x)
    weights = (tokens @ tokens.transpose(1, 2) / x.shape[1] ** 0.5).softmax(-1)
    return _map(weights @ tokens, x)


def _pooled(x: Tensor, n: Numbers) -> Tensor:
    return x + _map(F.adaptive_avg_pool1d(_tokens(x), 1).expand_as(_tokens(x)), x)


def _window(x: Tensor, n: Numbers) -> Tensor:
    return x + _map(F.avg_pool1d(_tokens(x), x.shape[1]).expand_as(_tokens(x)), x)


def _triangle(x: Tensor, n: Numbers) -> Tensor:
    return _map(_tokens(x) @ torch.ones(x.shape[1], x.shape[1]).triu().to(x), x)


def _encoded(x: Tensor, n: Numbers) -> Tensor:
    turns = torch.arange(x.shape[1]) / 2 / x.shape[1]
    return x + _across(torch.sin(10.0 ** (-turns)), x)


Spelling = Callable[[Tensor, Numbers], Tensor]

SPELLINGS: dict[str, Spelling] = {
    "root": lambda x, n: x / x.shape[1] ** 0.5,
    "size": lambda x, n: x * x.size(1) * 0.1,
    "one when whole": lambda x, n: x * (x.size()[1] / n.whole),
    "nought when whole": lambda x, n: x + (x.shape[1] - n.whole),
    "entries": lambda x, n: x * (100 / x.numel()),
    "nelement": lambda x, n: x * (100 / x.nelement()),
    "length": lambda x, n: x * 0.1 * len(x[0]),
    "length of parts": lambda x, n: x * 0.1 * len(x.unbind(1)),
    "length of chunks": lambda x, n: x * 0.1 * len(x.split(2, 1)),
    "length of a list": lambda x, n: x * 0.1 * len(x[0].tolist()),
    "tensor": lambda x, n: x / torch.tensor(x.shape[1]),
    "tensor of floats": lambda x, n: x / torch.tensor([float(s) for s in x.shape])[1].to(x),
    "tensor of sizes": lambda x, n: x / torch.as_tensor(x.shape)[1],
    "new tensor": lambda x, n: x / x.new_tensor(x.shape[1]),
    "scalar tensor": lambda x, n: x / torch.scalar_tensor(x.shape[1]),
    "filled": lambda x, n: x / torch.full((), x.shape[1]),
    "new filled": lambda x, n: x / x.new_full((1,), x.shape[1]),
    "under": lambda x, n: 2 * x if x.shape[1] < n.other else x,
    "equal": lambda x, n: 2 * x if x.shape[1] == n.other else x,
    "odd": lambda x, n: 2 * x if x.shape[1] % 2 != n.whole % 2 else x,
    "not whole": lambda x, n: 2 * x if x.shape[1] != n.whole else x,
    "at most": lambda x, n: x * 0.1 * min(x.shape[1], n.other),
    "mean": lambda x, n: x + x.sum(1, keepdim=True) / x.shape[1],
    "normalised": _normalised_by_hand,
    "root mean square": lambda x, n: (
        x * x.shape[1] ** 0.5 / (1 + x.square().sum(1, keepdim=True)).sqrt()
    ),
    "arange": lambda x, n: x + _across(torch.arange(x.shape[1]) / x.shape[1], x),
    "linspace": lambda x, n: x * _across(torch.linspace(0.5, 1.5, x.shape[1]), x),
    "last of arange": lambda x, n: x + torch.arange(x.shape[1])[-1],
    "ones": lambda x, n: x / torch.ones(x.shape[1]).sum(),
    "ones like": lambda x, n: x / torch.ones_like(x).sum(1, keepdim=True),
    "eye": lambda x, n: x / torch.eye(x.shape[1]).trace().to(x),
    "counted up": lambda x, n: x / x.new_ones(x.shape[1]).cumsum(0)[-1],
    "logarithm": lambda x, n: x * math.log(1 + x.shape[1]),
    "in turn": _summed_in_turn,
    "enumerated": lambda x, n: torch.stack([v * (i + 1) for i, v in enumerate(x.unbind(1))], 1),
    "text": lambda x, n: x * 0.1 * float(f"{x.shape[1]}"),
    "stride": lambda x, n: x * (x.stride(0) / 100),
    "bytes": lambda x, n: x * (x.nbytes / 1e3),
    "sum of sizes": lambda x, n: x * (sum(x.shape) / 10),
    "product of sizes": lambda x, n: x * (math.prod(x.shape[1:]) / 100),
    "numpy": lambda x, n: x / float(np.sqrt(x.shape[1])),
    "largest": lambda x, n: x + x.topk(max(1, x.shape[1] // 2), 1).values.sum(1, keepdim=True),
    "median": lambda x, n: x + x.median(1, keepdim=True).values,
    "groups": lambda x, n: F.group_norm(x, x.shape[1]),
    "few groups": lambda x, n: F.group_norm(x, 2 if x.shape[1] % 2 == 0 else 1),
    "temperature": lambda x, n: x + (x / x.shape[1] ** 0.5).flatten(1).softmax(-1).view_as(x),
    "pooled over channels": _pooled,
    "window over channels": _window,
    "fourier": lambda x, n: torch.fft.fft(x, dim=1, norm="ortho").real,
    "expanded": lambda x, n: x + x.mean(1, keepdim=True).expand_as(x),
    "repeated": lambda x, n: x + x[:, :1].repeat(1, x.shape[1], *[1] * (x.dim() - 2)),
    "mask": lambda x, n: torch.where(
        _across(torch.arange(x.shape[1]) < x.shape[1] // 2, x).bool(), x, 2 * x
    ),
    "triangle": _triangle,
    "similar": _similar,
    "spread": lambda x, n: x / (1 + x.std(1, keepdim=True)),
    "functional norm": lambda x, n: F.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1),
    "share that is positive": lambda x, n: x * ((x > 0).sum(1, keepdim=True) / x.shape[1]),
    "mean of exponentials": lambda x, n: x + x.logsumexp(1, keepdim=True) - math.log(x.shape[1]),
    "encoded": _encoded,
    "padded": lambda x, n: F.pad(x, [0, 0] * (x.dim() - 2) + [0, n.whole - x.shape[1]]),
    "cumulative": lambda x, n: x.cumsum(1) / _across(torch.arange(1, x.shape[1] + 1), x),
}


class Reads(nn.Module):
    """One spelling of a width, read as a number."""

    def __init__(self, spelling: Spelling, numbers: Numbers) -> None:
        super().__init__()
        self.spelling, self.numbers = spelling, numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(x, self.numbers)


def _reading(spelling: Spelling) -> Part:
    def drawn(rng: Rng, size: Size) -> Drawn | None:
        if size.channels < 2:
            return None
        numbers = Numbers(size.channels, rng.randint(2, size.channels))
        return Reads(spelling, numbers), size

    return drawn


class Remembered(nn.Module):
    """The width in an attribute, which the code computes with."""

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "attribute":
            self.channels = channels
        elif kind == "attribute of floats":
            self.channels = float(channels)
        elif kind == "attribute in a tuple":
            self.sizes = (channels, 2)
        elif kind == "attribute in a dict":
            self.options = {"channels": channels}
        else:  # longer than it needs to be, as tables of positions are
            self.register_buffer("table", torch.linspace(0.5, 1.5, 30))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("attribute", "attribute of floats"):
            return x / self.channels
        if self.kind == "attribute in a tuple":
            return x / self.sizes[0]
        if self.kind == "attribute in a dict":
            return x / self.options["channels"]
        if self.kind == "start of a table":
            return x * _across(self.table[: x.shape[1]], x)
        return x * self.table[x.shape[1]]


REMEMBERED = ("attribute", "attribute of floats", "attribute in a tuple", "attribute in a dict")
REMEMBERED += ("start of a table", "entry of a table")


def _remembering(kind: str) -> Part:
    def drawn(rng: Rng, size: Size) -> Drawn | None:
        return Remembered(kind, size.channels), size

    return drawn


class Layers(nn.Module):
    """Two layers; what lies between is scaled by a number that one of them tells of itself."""

    def __init__(self, kind: str, rng: Rng, size: Size, after: int) -> None:
        super().__init__()
        self.kind = kind
        hidden = rng.choice(WIDTHS)
        self.a = convolution(rng, size.dims, size.channels, hidden)
        self.norm = any_norm(rng, size.dims, hidden)
        self.b = convolution(rng, size.dims, hidden, after)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.a(x)))
        if self.kind == "fan in":
            return _with(self.b, self.b.weight * self.b.weight.shape[1] ** -0.5, h)
        if self.kind == "standardised weight":
            weight = self.b.weight
            over = list(range(1, weight.dim()))
            weight = weight - weight.mean(over, keepdim=True)
            return _with(self.b, weight / (1 + weight.var(over, keepdim=True)), h)
        return self.b(h * OWN_SIZES[self.kind](self))


def _with(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    out: Tensor = layer._conv_forward(x, weight, layer.bias)  # type: ignore[operator]
    return out


def _inputs(layer: nn.Module) -> int:
    return int(getattr(layer, "in_features", 0) or layer.in_channels)


def _outputs(layer: nn.Module) -> int:
    return int(getattr(layer, "out_features", 0) or layer.out_channels)


OWN_SIZES: dict[str, Callable[[Layers], float | Tensor]] = {
    "inputs of a layer": lambda m: _inputs(m.b) ** -0.5,
    "outputs of a layer": lambda m: _outputs(m.a) ** -0.5,
    "rows of a weight": lambda m: m.a.weight.shape[0] / 10,
    "columns of a weight": lambda m: m.b.weight.size(1) / 10,
    "entries of a weight": lambda m: m.b.weight.numel() / 100,
    "length of a weight": lambda m: len(m.a.weight) / 10,
    "fan of a weight": lambda m: nn.init._calculate_fan_in_and_fan_out(m.b.weight)[0] ** -0.5,
    "parameters of a module": lambda m: sum(p.numel() for p in m.parameters()) / 100,
    "sizes in a state dict": lambda m: sum(v.numel() for v in m.state_dict().values()) / 100,
    "mean of a weight": lambda m: 1 + m.b.weight.mean(),
    "norm of a weight": lambda m: 1 / (1 + m.b.weight.norm()),
    "ratio of two layers": lambda m: _outputs(m.a) / _inputs(m.b) + _inputs(m.a) / 10,
    "text of a layer": lambda m: len(repr(m.a)) / 100,
}
LAYERS = (*OWN_SIZES, "fan in", "standardised weight")


def _layered(kind: str) -> Part:
    def drawn(rng: Rng, size: Size) -> Drawn | None:
        after = rng.choice(WIDTHS)
        return Layers(kind, rng, size, after), Size(after, size.space)

    return drawn


WIDTH_READERS: dict[str, Part] = {
    **{f"width {name}": _reading(spelling) for name, spelling in SPELLINGS.items()},
    **{f"width {name}": _remembering(name) for name in REMEMBERED},
    **{f"width {name}": _layered(name) for name in LAYERS},
}
