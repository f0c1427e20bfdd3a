"""The parts that random networks are drawn from: each takes a size and gives a module and a size.

Maps are (batch, channels, *space) with no to three dimensions of space. A part that a size does not
suit gives None, and another is drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (4, 6, 8, 10, 12)
MOST = 24  # channels, and
ENTRIES = 256  # positions of a map, so that a network takes milliseconds


@dataclass(frozen=True)
class Size:
    """Of a map: channels and extents of space."""

    channels: int
    space: tuple[int, ...]

    @property
    def dims(self) -> int:
        return len(self.space)


class Rng(random.Random):
    """The random numbers of one network; it remembers which elements were drawn with them."""

    drawn: list[str]
    without: frozenset[str]  # groups of elements that are left out
    unusual: Callable[[Rng, Size], tuple[str, Drawn] | None]  # what may come behind a part


def seeded(seed: object) -> Rng:
    """Random numbers that draw nothing unusual."""
    rng = Rng(str(seed)) if not isinstance(seed, int) else Rng(seed)
    rng.drawn, rng.without = [], frozenset()
    rng.unusual = lambda rng, size: None
    return rng


Drawn = tuple[nn.Module, Size]
Part = Callable[[Rng, Size], "Drawn | None"]
PARTS: dict[str, Part] = {}


def part(function: Part) -> Part:
    PARTS[function.__name__] = function
    return function


class Lambda(nn.Module):
    """A function of a map, with modules of its own."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)


def chain(rng: Rng, size: Size, length: int, names: Sequence[str] = ()) -> Drawn:
    """Some parts one after the other."""
    modules: list[nn.Module] = []
    for _ in range(length):
        drawn = None
        while drawn is None or not _fits(drawn[1]):
            name = rng.choice(list(names) or list(PARTS))
            drawn = PARTS[name](rng, size)
        rng.drawn.append(name)
        modules.append(drawn[0])
        size = drawn[1]
        more = rng.unusual(rng, size)
        if more is not None and _fits(more[1][1]):
            rng.drawn.append(more[0])
            modules.append(more[1][0])
            size = more[1][1]
    return nn.Sequential(*modules), size


def _fits(size: Size) -> bool:
    return size.channels <= MOST and math.prod(size.space) <= ENTRIES and 0 not in size.space


SIMPLE = ("layer", "depthwise", "functional", "activation", "normalised")


def branch(rng: Rng, size: Size, out: int | None = None) -> nn.Module:
    """A short way beside another: the same space, and `out` channels."""
    modules: list[nn.Module] = []
    width = size.channels
    for last in [False] * rng.randint(0, 1) + [True]:
        after = (out or size.channels) if last else rng.choice(WIDTHS)
        modules.append(convolution(rng, size.dims, width, after, rng.choice((1, 3))))
        modules += [norm(rng, size.dims, after)] if rng.random() < 0.6 else []
        modules += [activation_module(rng, after)] if not last or rng.random() < 0.3 else []
        width = after
    return nn.Sequential(*modules)


def convolution(
    rng: Rng, dims: int, before: int, after: int, kernel: int = 1, **options: Any
) -> nn.Module:
    """A convolution that keeps the space unless `options` say otherwise; linear without space."""
    bias = rng.random() < 0.5
    if dims == 0:
        return nn.Linear(before, after, bias=bias)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    modes = ("zeros", "zeros", "zeros", "replicate", "circular")
    options = {"padding": kernel // 2, "bias": bias, "padding_mode": rng.choice(modes)} | options
    return kind(before, after, kernel, **options)


def norm(rng: Rng, dims: int, channels: int) -> nn.Module:
    """A normalisation that any width and space take."""
    batch: Any = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    groups = rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
    choices: list[Callable[[], nn.Module]] = [
        lambda: batch(channels),
        lambda: batch(channels),
        lambda: batch(channels, affine=False, eps=1e-3),
        lambda: nn.GroupNorm(groups, channels, affine=rng.random() < 0.7),
    ]
    if dims:
        choices.append(lambda: ChannelLast(nn.LayerNorm(channels)))
    else:
        choices.append(lambda: nn.LayerNorm(channels))
    return rng.choice(choices)()


ACTIVATIONS: tuple[Callable[[int], nn.Module], ...] = (
    lambda c: nn.ReLU(),
    lambda c: nn.ReLU(),
    lambda c: nn.ReLU(inplace=True),
    lambda c: nn.LeakyReLU(0.1, inplace=True),
    lambda c: nn.GELU(),
    lambda c: nn.SiLU(),
    lambda c: nn.Hardswish(),
    lambda c: nn.Tanh(),
    lambda c: nn.Sigmoid(),
    lambda c: nn.ELU(),
    lambda c: nn.PReLU(c),
    lambda c: nn.PReLU(),
    lambda c: nn.Softplus(),
    lambda c: Lambda(lambda x: F.relu6(x)),
    lambda c: Lambda(lambda x: x.clamp(min=0).sqrt()),
)


def activation_module(rng: Rng, channels: int) -> nn.Module:
    return rng.choice(ACTIVATIONS)(channels)


class ChannelLast(nn.Module):
    """A module that takes channels last, on a map that has them second."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.movedim(1, -1)).movedim(-1, 1)


class Tokens(nn.Module):
    """A module on sequences (batch, positions, channels), on a map."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inner(x.flatten(2).transpose(1, 2))
        return tokens.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])


@part
def layer(rng: Rng, size: Size) -> Drawn:
    """A convolution with or without normalisation and activation, the most usual part."""
    after, kernel = rng.choice(WIDTHS), rng.choice((1, 3))
    options: dict[str, Any] = {}
    space = size.space
    if size.dims and kernel == 3:
        if rng.random() < 0.3 and min(space) > 3:
            options["stride"] = 2
            space = tuple((s + 1) // 2 for s in space)
        elif rng.random() < 0.2 and min(space) > 4:
            options |= {"dilation": 2, "padding": 2}
    modules = [convolution(rng, size.dims, size.channels, after, kernel, **options)]
    modules += [norm(rng, size.dims, after)] if rng.random() < 0.6 else []
    modules += [activation_module(rng, after)] if rng.random() < 0.8 else []
    return nn.Sequential(*modules), Size(after, space)


PARTS["layer again"] = PARTS["and again"] = layer  # what most networks are made of


@part
def grouped(rng: Rng, size: Size) -> Drawn | None:
    """A convolution in groups."""
    groups = [g for g in (2, 3, 4) if size.channels % g == 0]
    if not size.dims or not groups:
        return None
    count = rng.choice(groups)
    after = count * rng.randint(1, 4)
    conv = convolution(rng, size.dims, size.channels, after, rng.choice((1, 3)), groups=count)
    return nn.Sequential(conv, activation_module(rng, after)), replace(size, channels=after)


@part
def depthwise(rng: Rng, size: Size) -> Drawn | None:
    """An inverted bottleneck: wider, by channel, and narrower."""
    if not size.dims:
        return None
    wide = rng.choice(WIDTHS)
    times = rng.choice((1, 1, 2))
    after = rng.choice(WIDTHS)
    middle = convolution(rng, size.dims, wide, wide * times, 3, groups=wide)
    modules = [
        *(convolution(rng, size.dims, size.channels, wide), norm(rng, size.dims, wide)),
        *(activation_module(rng, wide), middle, activation_module(rng, wide * times)),
        convolution(rng, size.dims, wide * times, after),
    ]
    return nn.Sequential(*modules), replace(size, channels=after)


@part
def transposed(rng: Rng, size: Size) -> Drawn | None:
    if not size.dims:
        return None
    kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[size.dims - 1]
    groups = rng.choice((1, 1, 2)) if size.channels % 2 == 0 else 1
    after = groups * rng.choice((3, 4, 5))
    stride = rng.choice((1, 2))
    conv = kind(size.channels, after, 2, stride, groups=groups, bias=rng.random() < 0.5)
    space = tuple((s - 1) * stride + 2 for s in size.space)
    return nn.Sequential(conv, norm(rng, size.dims, after), nn.ReLU()), Size(after, space)


@part
def pooling(rng: Rng, size: Size) -> Drawn | None:
    if not size.dims or min(size.space) < 4:
        return None
    d = size.dims - 1
    most: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[d]
    mean: Any = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[d]
    adaptive: Any = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool3d)[d]
    if rng.random() < 0.3:
        return adaptive(2), replace(size, space=(2,) * size.dims)
    return rng.choice((most, mean))(2), replace(size, space=tuple(s // 2 for s in size.space))


@part
def activation(rng: Rng, size: Size) -> Drawn:
    modules = [activation_module(rng, size.channels)]
    modules += [nn.Dropout(0.2)] if rng.random() < 0.3 else []
    return nn.Sequential(*modules), size


@part
def normalised(rng: Rng, size: Size) -> Drawn:
    return norm(rng, size.dims, size.channels), size


@part
def residual(rng: Rng, size: Size) -> Drawn:
    """A sum, difference, product or maximum of two ways, also in place."""
    ways = [branch(rng, size)]
    if rng.random() < 0.4:
        ways.append(branch(rng, size))
    joins: list[Callable[..., Tensor]] = [
        lambda x, a, b=None: (x if b is None else b(x)) + a(x),
        lambda x, a, b=None: (x if b is None else b(x)) - a(x),
        lambda x, a, b=None: torch.add(a(x), x if b is None else b(x), alpha=0.5),
        lambda x, a, b=None: a(x.clone()).clone().add_(x if b is None else b(x)),
        lambda x, a, b=None: torch.maximum(x if b is None else b(x), a(x)),
        lambda x, a, b=None: (x if b is None else b(x)) * torch.sigmoid(a(x)),
        lambda x, a, b=None: torch.stack([x if b is None else b(x), a(x)], 1).sum(1),
        lambda x, a, b=None: torch.lerp(x if b is None else b(x), a(x), 0.3),
    ]
    # Whoever works in place must not see what the other way still reads.
    ways = [nn.Sequential(Lambda(lambda x: x.clone()), way) for way in ways]
    return Lambda(rng.choice(joins), *ways), size


class Broadcast(nn.Module):
    """A map with something smaller added or multiplied: a summary, a parameter, a buffer."""

    def __init__(self, rng: Rng, size: Size) -> None:
        super().__init__()
        self.space = list(range(2, 2 + size.dims))
        self.kind = rng.choice(("add", "excite", "offset", "scale", "buffer", "position", "mean"))
        ones = (1,) * size.dims
        if self.kind in ("add", "excite"):
            hidden = rng.choice(WIDTHS)
            self.down = nn.Linear(size.channels, hidden)
            self.up = nn.Linear(hidden, size.channels)
        elif self.kind in ("offset", "scale"):
            self.own = nn.Parameter(torch.ones(size.channels, *ones))
        elif self.kind == "buffer":
            self.register_buffer("own", torch.linspace(0.5, 1.5, size.channels).view(-1, *ones))
        elif self.kind == "position":
            shape = (1, size.channels, *size.space)
            self.own = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("add", "excite"):
            mean = x.mean(self.space) if self.space else x
            made = self.up(F.relu(self.down(mean))).reshape(*x.shape[:2], *[1] * len(self.space))
            return x + made if self.kind == "add" else x * torch.sigmoid(made)
        if self.kind == "mean":
            return x - x.mean(1, keepdim=True)
        return x * self.own if self.kind in ("scale", "buffer") else x + self.own


@part
def broadcast(rng: Rng, size: Size) -> Drawn:
    return Broadcast(rng, size), size


@part
def concatenated(rng: Rng, size: Size) -> Drawn | None:
    """Ways side by side, perhaps with what went in."""
    widths = [rng.choice((3, 4, 5)) for _ in range(rng.randint(1, 3))]
    whole = rng.random() < 0.5
    if sum(widths) + whole * size.channels > MOST or (len(widths) == 1 and not whole):
        return None
    ways = [nn.Sequential(Lambda(lambda x: x.clone()), branch(rng, size, w)) for w in widths]

    def join(x: Tensor, *inner: nn.Module) -> Tensor:
        return torch.cat([x] * whole + [way(x) for way in inner], dim=1)

    return Lambda(join, *ways), replace(size, channels=sum(widths) + whole * size.channels)


@part
def split(rng: Rng, size: Size) -> Drawn | None:
    """A part of the channels goes its own way, and both are put together again."""
    if size.channels % 2 or size.channels < 4:
        return None
    half = size.channels // 2
    first = half if rng.random() < 0.7 else rng.randint(1, size.channels - 1)
    way = branch(rng, Size(first, size.space), first)
    shuffled, by_index = rng.random() < 0.5, rng.random() < 0.3
    turned = rng.random() < 0.3

    def run(x: Tensor, inner: nn.Module) -> Tensor:
        if by_index:
            a, b = x[:, :first], x[:, first:]
        else:
            a, b = x.split([first, x.shape[1] - first], 1) if first != half else x.chunk(2, 1)
        parts = [b, inner(a.clone())] if turned else [inner(a.clone()), b]
        out = torch.cat(parts, 1)
        return shuffle(out, 2) if shuffled else out

    return Lambda(run, way), size


def shuffle(x: Tensor, groups: int) -> Tensor:
    """Channels of all groups in turns."""
    apart = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return apart.transpose(1, 2).flatten(1, 2)


@part
def shuffled(rng: Rng, size: Size) -> Drawn | None:
    groups = [g for g in (2, 3, 4) if size.channels % g == 0]
    if not groups:
        return None
    count = rng.choice(groups)
    return Lambda(lambda x: shuffle(x, count)), size


@part
def reordered(rng: Rng, size: Size) -> Drawn:
    """Channels taken by number: some of them, in another order, or twice."""
    c = size.channels
    kind = rng.choice(("slice", "flip", "index", "repeat", "roll"))
    if kind == "slice":
        return Lambda(lambda x: x[:, : c // 2 + 1]), replace(size, channels=c // 2 + 1)
    if kind == "flip":
        return Lambda(lambda x: x.flip(1)), size
    if kind == "roll":
        return Lambda(lambda x: x.roll(1, 1)), size
    if kind == "repeat":
        return Lambda(lambda x: torch.cat([x, x], 1)), replace(size, channels=2 * c)
    return Selected(torch.tensor(rng.sample(range(c), c // 2 + 1))), replace(
        size, channels=c // 2 + 1
    )


class Selected(nn.Module):
    """Channels by the numbers in a buffer."""

    index: Tensor

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.index)


@part
def spatial(rng: Rng, size: Size) -> Drawn | None:
    """What moves positions and leaves channels alone."""
    if not size.dims:
        return None
    kind = rng.choice(("pad", "flip", "roll", "step", "larger", "permute", "pixels", "sum"))
    space = size.space
    if kind == "pad":
        return Lambda(lambda x: F.pad(x, (1, 0))), replace(size, space=(*space[:-1], space[-1] + 1))
    if kind == "flip":
        return Lambda(lambda x: x.flip(-1)), size
    if kind == "roll":
        return Lambda(lambda x: torch.roll(x, 1, -1)), size
    if kind == "step":
        half = (*space[:-1], (space[-1] + 1) // 2)
        return Lambda(lambda x: x[..., ::2]), replace(size, space=half)
    if kind == "larger":
        doubled = tuple(2 * s for s in space)
        return Lambda(lambda x: F.interpolate(x, scale_factor=2.0)), replace(size, space=doubled)
    if kind == "permute" and size.dims == 2:
        return Lambda(lambda x: x.permute(0, 1, 3, 2)), replace(size, space=space[::-1])
    if kind == "pixels" and size.dims == 2 and size.channels % 4 == 0 and size.channels > 4:
        doubled = tuple(2 * s for s in space)
        return nn.PixelShuffle(2), Size(size.channels // 4, doubled)
    return Lambda(lambda x: x + x.mean(-1, keepdim=True)), size


class Attention(nn.Module):
    """Self-attention written out, with or without a mask that holds −inf."""

    mask: Tensor

    def __init__(self, rng: Rng, channels: int, length: int) -> None:
        super().__init__()
        self.heads = rng.choice((1, 2))
        self.width = self.heads * rng.choice((2, 4))
        self.apart = rng.random() < 0.5
        if self.apart:
            self.q, self.k = nn.Linear(channels, self.width), nn.Linear(channels, self.width)
            self.v = nn.Linear(channels, self.width, bias=False)
        else:
            self.qkv = nn.Linear(channels, 3 * self.width)
        self.out = nn.Linear(self.width, channels)
        self.kind = rng.choice(("function", "masked", "by hand"))
        future = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", future)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        parts = (self.q(x), self.k(x), self.v(x)) if self.apart else self.qkv(x).chunk(3, -1)
        q, k, v = (y.reshape(b, n, self.heads, -1).transpose(1, 2) for y in parts)
        if self.kind == "by hand":
            weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + self.mask).softmax(-1)
            out = weights @ v
        else:
            mask = self.mask if self.kind == "masked" else None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).reshape(b, n, -1))


class Heads(nn.Module):
    """torch's own module of attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


@part
def attention(rng: Rng, size: Size) -> Drawn | None:
    if not size.dims or size.channels % 2:
        return None
    length = math.prod(size.space)
    inner = Heads(size.channels) if rng.random() < 0.3 else Attention(rng, size.channels, length)
    first = nn.LayerNorm(size.channels) if rng.random() < 0.6 else nn.Identity()
    return Lambda(lambda x, f: x + f(x), Tokens(nn.Sequential(first, inner))), size


@part
def feed_forward(rng: Rng, size: Size) -> Drawn | None:
    """The MLP of a transformer, channels last."""
    if not size.dims:
        return None
    hidden = rng.choice(WIDTHS)
    modules = [nn.LayerNorm(size.channels), nn.Linear(size.channels, hidden), nn.GELU()]
    modules += [nn.Dropout(0.1)] if rng.random() < 0.3 else []
    modules.append(nn.Linear(hidden, size.channels))
    way = ChannelLast(nn.Sequential(*modules))
    return (Lambda(lambda x, f: x + f(x), way) if rng.random() < 0.7 else way), size


class Recurrent(nn.Module):
    """A recurrent layer along all positions."""

    def __init__(self, rng: Rng, channels: int, hidden: int) -> None:
        super().__init__()
        kind: Any = rng.choice((nn.LSTM, nn.GRU, nn.RNN))
        two = rng.random() < 0.3
        self.inner = kind(channels, hidden // (1 + two), batch_first=True, bidirectional=two)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@part
def recurrent(rng: Rng, size: Size) -> Drawn | None:
    if not size.dims or math.prod(size.space) > 12:  # each step is followed on its own
        return None
    hidden = rng.choice((4, 6, 8))
    way = Tokens(Recurrent(rng, size.channels, hidden))
    return way, replace(size, channels=hidden)


class Gated(nn.Module):
    """One half of the channels, or a second layer, gates the other."""

    def __init__(self, rng: Rng, size: Size, after: int) -> None:
        super().__init__()
        self.kind = rng.choice(("glu", "chunk", "two"))
        wide = after if self.kind == "two" else 2 * after
        self.value = convolution(rng, size.dims, size.channels, wide)
        self.gate = convolution(rng, size.dims, size.channels, after)
        if self.kind != "two":
            del self.gate

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "two":
            return self.value(x) * F.silu(self.gate(x))
        if self.kind == "glu":
            return F.glu(self.value(x), dim=1)
        a, b = self.value(x).chunk(2, 1)
        return a * torch.tanh(b)


@part
def gated(rng: Rng, size: Size) -> Drawn:
    after = rng.choice((4, 6, 8))
    return Gated(rng, size, after), replace(size, channels=after)


class Twice(nn.Module):
    """One layer that runs twice, with activations between, or with its weight tied to another."""

    def __init__(self, rng: Rng, size: Size, tied: bool) -> None:
        super().__init__()
        inner = rng.choice(WIDTHS)
        self.into = convolution(rng, size.dims, size.channels, inner)
        self.same = convolution(rng, size.dims, inner, inner, rng.choice((1, 3)))
        self.other = convolution(rng, size.dims, inner, inner) if tied else self.same
        if tied:
            self.other = type(self.same)(*_sizes_of(self.same))
            self.other.weight = self.same.weight
        self.norm = norm(rng, size.dims, inner) if rng.random() < 0.5 else nn.Identity()
        self.out = convolution(rng, size.dims, inner, size.channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.same(self.into(x))))
        return self.out(F.relu(self.norm(self.other(x))))


def _sizes_of(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    kernel = module.kernel_size[0]
    return module.in_channels, module.out_channels, kernel, 1, kernel // 2


@part
def shared(rng: Rng, size: Size) -> Drawn:
    return Twice(rng, size, tied=False), size


@part
def tied(rng: Rng, size: Size) -> Drawn:
    return Twice(rng, size, tied=True), size


class Functional(nn.Module):
    """Layers as calls on parameters of the module's own, the bias within the call or behind it."""

    def __init__(self, rng: Rng, size: Size, after: int) -> None:
        super().__init__()
        self.kind = rng.choice(("within", "behind", "matmul", "addmm", "conv", "keywords"))
        if self.kind in ("conv", "addmm") and not size.dims:
            self.kind = "within"
        self.turned = self.kind in ("matmul", "addmm")
        rows = (size.channels, after) if self.turned else (after, size.channels)
        self.weight = nn.Parameter(torch.randn(rows))
        self.offset = nn.Parameter(torch.randn(after))
        self.dims = size.dims

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "conv":
            kernel = self.weight[(..., *[None] * self.dims)]
            conv: Any = (F.conv1d, F.conv2d, F.conv3d)[self.dims - 1]
            return conv(x, kernel, None) + self.offset.view(-1, *[1] * self.dims)
        last = x.movedim(1, -1)
        if self.kind == "within":
            out = F.linear(last, self.weight, self.offset)
        elif self.kind == "keywords":
            out = F.linear(input=last, weight=self.weight, bias=self.offset)
        elif self.kind == "behind":
            out = F.linear(last, self.weight) + self.offset
        elif self.kind == "addmm":
            flat = torch.addmm(self.offset, last.flatten(0, -2), self.weight)
            out = flat.reshape(*last.shape[:-1], -1)
        else:
            out = last @ self.weight + self.offset
        return out.movedim(-1, 1)


@part
def functional(rng: Rng, size: Size) -> Drawn:
    after = rng.choice(WIDTHS)
    return Functional(rng, size, after), replace(size, channels=after)


class InPlace(nn.Module):
    """Calls that write where they read."""

    factor: Tensor

    def __init__(self, rng: Rng) -> None:
        super().__init__()
        self.kind = rng.choice(("relu", "scale", "add", "write", "clamp", "part"))
        self.register_buffer("factor", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.kind == "relu":
            return x.relu_()
        if self.kind == "scale":
            return x.mul_(self.factor)
        if self.kind == "add":
            x += 0.5
            return x
        if self.kind == "clamp":
            return torch.clamp_(x, -1, 1)
        if self.kind == "write":
            out = torch.zeros_like(x)
            out[:] = x
            return out
        x[:, :2] = 0
        return x


@part
def in_place(rng: Rng, size: Size) -> Drawn:
    return InPlace(rng), size


class Remembering(nn.Module):
    """Keeps what it saw on itself, as visualisers and reversible normalisations do."""

    def __init__(self, rng: Rng) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.mean(0)
        return x + 0.0 * self.seen.sum()


@part
def remembering(rng: Rng, size: Size) -> Drawn | None:
    return (Remembering(rng), size) if rng.random() < 0.3 else None


@part
def parametrised(rng: Rng, size: Size) -> Drawn:
    """A layer whose weight is computed from others."""
    from torch.nn.utils.parametrizations import weight_norm

    after = rng.choice(WIDTHS)
    conv = weight_norm(convolution(rng, size.dims, size.channels, after))
    return nn.Sequential(conv, nn.ReLU()), replace(size, channels=after)


@part
def summarised(rng: Rng, size: Size) -> Drawn:
    """What reads all channels at once: softmax, norms, sorting."""
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.softmax(1),
        lambda x: F.normalize(x, dim=1),
        lambda x: x / (1 + x.abs().amax(1, keepdim=True)),
        lambda x: x.cumsum(1),
        lambda x: x * (x > 0),
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: torch.einsum("bc...,bc...->bc...", x, x),
    ]
    return Lambda(rng.choice(kinds)), size
