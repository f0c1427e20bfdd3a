"""Parts that few networks have, and that ask much of who cuts them, by group.

Paths that values decide, forwards that write, complex numbers, rotary positions, gradients inside
of a forward, parametrised weights, mixtures of experts. Widths read as numbers lie in `widths`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from support.fuzz.parts import WIDTHS, Drawn, Lambda, Part, Rng, Size, Tokens, convolution, norm
from support.fuzz.widths import WIDTH_READERS

OFTEN = 0.2  # behind how many parts an unusual one is drawn

UNUSUAL: dict[str, Part] = dict(WIDTH_READERS)


def _each(group: str, kinds: tuple[str, ...]) -> Callable[[Callable[..., Drawn | None]], None]:
    """Registers a part for each of its kinds."""

    def register(function: Callable[..., Drawn | None]) -> None:
        for kind in kinds:

            def drawn(rng: Rng, size: Size, kind: str = kind) -> Drawn | None:
                return function(kind, rng, size)

            UNUSUAL[f"{group} {kind}"] = drawn

    return register


class Decides(nn.Module):
    """What runs depends on the values of a map."""

    def __init__(self, kind: str, rng: Rng, size: Size) -> None:
        super().__init__()
        c, self.kind = size.channels, kind
        if kind in ("either", "once more"):
            self.up = convolution(rng, size.dims, c, c)
        self.down = convolution(rng, size.dims, c, c)
        if kind == "norms":
            self.norms = nn.ModuleList(norm(rng, size.dims, c) for _ in range(2))
        elif kind == "flattened":
            self.gate = nn.Linear(c * math.prod(size.space), c)
        elif kind == "beside itself":
            self.wide = convolution(rng, size.dims, 2 * c, c)
        elif kind == "half":
            self.narrow = convolution(rng, size.dims, c // 2, c)
        elif kind == "own parameter":
            self.weight = nn.Parameter(torch.randn(c, c))
        elif kind == "vector":
            self.scale = nn.Parameter(torch.randn(c))
        elif kind == "gate":
            self.gate = nn.Sequential(nn.Linear(c, 3), nn.ReLU(), nn.Linear(3, c))
        elif kind == "listed":
            self.listed = nn.ParameterList([torch.randn(c, c), torch.randn(c, c)])
        elif kind == "hidden":
            self.hidden = [convolution(rng, size.dims, c, c)]
            self.own = nn.ModuleDict({"deep": nn.Sequential(nn.ReLU(), self.hidden[0])})

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x) if self.kind != "skipped" else x
        often = bool(x.mean() > 1e-6)  # what is normalised has nought but for rounding
        if self.kind == "norms":
            return self.norms[int(often)](h)
        if not often:
            return h
        ones = [1] * (x.dim() - 2)
        last = h.movedim(1, -1)
        made: dict[str, Callable[[], Tensor]] = {
            "either": lambda: self.up(x),
            "once more": lambda: self.up(h),
            "skipped": lambda: x + self.down(x),
            "flattened": lambda: h * self.gate(h.flatten(1)).sigmoid().reshape(*h.shape[:2], *ones),
            "beside itself": lambda: self.wide(torch.cat([h, x], 1)),
            "half": lambda: self.narrow(h[:, : h.shape[1] // 2]),
            "own parameter": lambda: F.linear(last, self.weight).movedim(-1, 1),
            "listed": lambda: (last @ self.listed[1]).movedim(-1, 1),
            "vector": lambda: h * self.scale.view(-1, *ones),
            "gate": lambda: (
                h * self.gate(h.flatten(2).mean(2)).reshape(*h.shape[:2], *ones)
                if ones
                else h * self.gate(h)
            ),
            "hidden": lambda: self.own["deep"](h),
        }
        out = made[self.kind]()
        # Channels stay what they are without the layer: no single run could tell it otherwise.
        return out if self.kind in ("either", "skipped", "flattened", "vector", "gate") else h + out


DECIDING = ("either", "once more", "skipped", "norms", "flattened", "beside itself", "half")
DECIDING += ("own parameter", "listed", "vector", "gate", "hidden")


@_each("path", DECIDING)
def _deciding(kind: str, rng: Rng, size: Size) -> Drawn | None:
    if kind == "half" and size.channels % 2:
        return None
    return Decides(kind, rng, size), size


class Writes(nn.Module):
    """Writes into what it keeps: buffers, attributes, lists."""

    count: Tensor
    mean: Tensor
    memory: Tensor

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        self.kind = kind
        if kind == "counter":
            self.register_buffer("count", torch.zeros(()))
        elif kind == "integer counter":
            self.register_buffer("count", torch.zeros(1, dtype=torch.long), persistent=False)
        elif kind == "moving mean":
            self.register_buffer("mean", torch.zeros(size.channels))
        elif kind == "moving scale":
            self.register_buffer("mean", torch.ones(()))
        elif kind == "memory":
            self.register_buffer("memory", torch.zeros(2, size.channels))
        elif kind == "number":
            self.calls = 0
        elif kind in ("list", "tensor"):
            self.seen: Any = []
        elif kind == "dict":
            self.seen = {"last": None, "calls": 0}
        elif kind == "late buffer":
            self.register_buffer("late", None)
        elif kind == "batch norm":
            self.norm = nn.BatchNorm1d(size.channels)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(2).mean((0, 2)) if x.dim() > 2 else x.mean(0)
        if self.kind == "counter":
            self.count += 1
        elif self.kind == "integer counter":
            self.count.add_(1)
        elif self.kind == "moving mean":
            self.mean.mul_(0.9).add_(0.1 * mean.detach())
        elif self.kind == "moving scale":
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().abs().mean())
            return x / self.mean
        elif self.kind == "memory":
            self.memory = torch.cat([self.memory[1:], mean.detach()[None]])
        elif self.kind == "number":
            self.calls += 1
        elif self.kind == "list":
            self.seen.append(x)
        elif self.kind == "tensor":
            self.seen = torch.zeros_like(x)
        elif self.kind == "dict":
            self.seen = {"last": mean, "calls": self.seen["calls"] + 1}
        elif self.kind == "late buffer":
            self.late = torch.zeros_like(x[0])
        elif self.kind == "batch norm":
            norm = self.norm
            return F.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.1
            )
        return x


WRITING = ("counter", "integer counter", "moving mean", "moving scale", "memory", "number")
WRITING += ("list", "tensor", "dict", "late buffer", "batch norm")


@_each("buffers", WRITING)
def _writing(kind: str, rng: Rng, size: Size) -> Drawn | None:
    return Writes(kind, size), size


class Complex(nn.Module):
    """Complex numbers on the way, or in the weights."""

    def __init__(self, kind: str, rng: Rng, size: Size) -> None:
        super().__init__()
        self.kind, c = kind, size.channels
        self.before = convolution(rng, size.dims, c, c)
        if kind == "layer":
            self.inner = nn.Linear(c, c, dtype=torch.complex128)
        elif kind == "two layers":
            self.inner = nn.Linear(c, 6, dtype=torch.complex128)
            self.outer = nn.Linear(6, c, dtype=torch.complex128)
        elif kind == "operator":
            self.weight = nn.Parameter(torch.randn(c, c, dtype=torch.complex128))
        elif kind == "pairs":
            self.turn = nn.Parameter(torch.randn(c // 2, dtype=torch.complex128))
        elif kind == "polar":
            self.angle = nn.Parameter(torch.randn(c // 2))
        elif kind == "parts":
            self.real, self.imaginary = (nn.Linear(c, c) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x).movedim(1, -1)
        if self.kind == "layer":
            out = self.inner(h.to(torch.complex128)).abs()
        elif self.kind == "two layers":
            y = self.inner(h.to(torch.complex128))
            y = torch.complex(y.real.relu(), y.imag.relu())
            out = self.outer(y).real
        elif self.kind == "operator":
            spectrum = torch.fft.fft(h.to(torch.complex128), dim=-2 if h.dim() > 2 else 0)
            mixed = torch.einsum("...i,io->...o", spectrum, self.weight)
            out = torch.fft.ifft(mixed, dim=-2 if h.dim() > 2 else 0).real
        elif self.kind == "spectrum":
            out = torch.fft.irfft(torch.fft.rfft(h, dim=0), n=len(h), dim=0)
        elif self.kind in ("pairs", "polar"):
            pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous())
            turn = (
                self.turn
                if self.kind == "pairs"
                else torch.polar(torch.ones_like(self.angle), self.angle)
            )
            out = torch.view_as_real(pairs * turn).flatten(-2)
        else:
            both = torch.complex(self.real(h), self.imaginary(h))
            out = both.abs() * torch.cos(both.angle())
        return out.movedim(-1, 1)


@_each("complex", ("layer", "two layers", "operator", "spectrum", "pairs", "polar", "parts"))
def _complex(kind: str, rng: Rng, size: Size) -> Drawn | None:
    if kind in ("pairs", "polar") and size.channels % 2:
        return None
    return Complex(kind, rng, size), size


class Rotary(nn.Module):
    """Attention with positions turned into queries and keys, or added to their products."""

    def __init__(self, kind: str, rng: Rng, channels: int) -> None:
        super().__init__()
        self.kind, self.heads, self.each = kind, rng.choice((2, 3)), 4
        self.shared = self.heads if rng.random() < 0.7 else 1
        width, few = self.heads * self.each, self.shared * self.each
        if rng.random() < 0.3 and self.shared == self.heads:
            self.qkv = nn.Linear(channels, 3 * width)
        else:
            self.q = nn.Linear(channels, width)
            self.k, self.v = nn.Linear(channels, few), nn.Linear(channels, few)
        self.out = nn.Linear(width, channels)
        self.scale = self.each**-0.5
        self.written = rng.choice(("whole", "function", "width", "in_features", "baddbmm"))

    def _turned(self, x: Tensor) -> Tensor:
        """The first channels of each head (all of them, or half) turned by their position."""
        part = self.each if self.kind in ("whole", "interleaved") else self.each // 2
        if self.kind == "biased":
            return x
        turned, rest = x[..., :part], x[..., part:]
        angle = torch.arange(x.shape[2])[:, None] / 10 ** torch.arange(part // 2)
        sin, cos = angle.sin().to(x), angle.cos().to(x)
        if self.kind in ("interleaved", "partial interleaved"):
            a, b = turned[..., ::2], turned[..., 1::2]
            made = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            made = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([made, rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.each).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (y.view(b, n, -1, self.each).transpose(1, 2) for y in self._made(x))
        q, k = self._turned(q), self._turned(k)
        if self.shared != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.shared, 1) for y in (k, v))
        if self.written == "function":
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = self._products(q, k).softmax(-1) @ v
        return self.out(out.transpose(1, 2).reshape(b, n, -1))

    def _made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        b, h, n, _ = q.shape
        near = -(torch.arange(n)[:, None] - torch.arange(n)).abs().to(q)
        if self.written == "baddbmm":
            flat = near.expand(b * h, n, n)
            turned = k.transpose(-2, -1).flatten(0, 1)
            made = torch.baddbmm(flat, q.flatten(0, 1), turned, beta=1.0, alpha=self.scale)
            return made.view(b, h, n, n)
        scale = {
            "width": q.shape[-1] ** -0.5,
            "in_features": self.out.in_features**-0.5,
        }.get(self.written, self.scale)
        products = q @ k.transpose(-2, -1) * scale
        return products + near if self.kind == "biased" else products


@_each("rotary", ("whole", "partial", "interleaved", "partial interleaved", "biased"))
def _rotary(kind: str, rng: Rng, size: Size) -> Drawn | None:
    if not size.dims:
        return None
    first = nn.LayerNorm(size.channels) if rng.random() < 0.6 else nn.Identity()
    inner = nn.Sequential(first, Rotary(kind, rng, size.channels))
    return Lambda(lambda x, f: x + f(x), Tokens(inner)), size


class Twofold(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Derives(nn.Module):
    """Gradients, or functions of functions, inside of a forward."""

    def __init__(self, kind: str, rng: Rng, size: Size) -> None:
        super().__init__()
        self.kind, hidden = kind, rng.choice(WIDTHS)
        self.a = convolution(rng, size.dims, size.channels, hidden)
        self.b = convolution(rng, size.dims, hidden, size.channels)

    def inner(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "own function":
            return Twofold.apply(self.inner(x))  # type: ignore[no-any-return, no-untyped-call]
        if self.kind == "checkpoint":
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.kind == "mapped":
            mapped: Tensor = torch.func.vmap(lambda one: self.inner(one[None])[0])(x)
            return mapped
        if self.kind == "functional gradient":
            slope: Tensor = torch.func.grad(lambda y: self.inner(y).square().sum())(x)
            return slope
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            energy = self.inner(start).square().sum()
            (slope,) = torch.autograd.grad(energy, start)
        return x - 0.1 * slope


@_each("autograd", ("gradient", "own function", "checkpoint", "mapped", "functional gradient"))
def _derived(kind: str, rng: Rng, size: Size) -> Drawn | None:
    return Derives(kind, rng, size), size


class Positive(nn.Module):
    """A parametrisation: weights above 0."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


@_each(
    "parametrised",
    (
        "weight norm",
        "spectral",
        "orthogonal",
        "positive",
        "old weight norm",
        "old spectral",
        "bias",
    ),
)
def _parametrised(kind: str, rng: Rng, size: Size) -> Drawn | None:
    """A layer whose weight is computed, between two others."""
    hidden, after = rng.choice(WIDTHS), rng.choice(WIDTHS)
    one = convolution(rng, size.dims, size.channels, hidden)
    two = convolution(rng, size.dims, hidden, after)
    which = rng.choice((one, two))
    make: dict[str, Callable[[nn.Module], Any]] = {
        "weight norm": parametrizations.weight_norm,
        "spectral": parametrizations.spectral_norm,
        "orthogonal": parametrizations.orthogonal,
        "positive": lambda m: parametrize.register_parametrization(m, "weight", Positive()),
        "old weight norm": nn.utils.weight_norm,
        "old spectral": nn.utils.spectral_norm,
        "bias": lambda m: (
            m.bias is None or parametrize.register_parametrization(m, "bias", Positive())
        ),
    }
    made = nn.Sequential(one, nn.ReLU(), two)
    if kind == "orthogonal":  # as QR gives it, which the default keeps in double precision too
        parametrizations.orthogonal(which, orthogonal_map="householder")
    else:
        make[kind](which)
    return made, Size(after, size.space)


class Experts(nn.Module):
    """Neurons of all experts in two tensors; a kernel that reads rows of 16 bytes runs them."""

    def __init__(self, experts: int, width: int, neurons: int, strict: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * neurons, width))
        self.down_proj = nn.Parameter(torch.randn(experts, width, neurons))
        self.act_fn = nn.SiLU()
        self.intermediate_size, self.strict = neurons, strict

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for rows in (self.gate_up_proj, self.down_proj) if self.strict else ():
            if rows.shape[-1] * rows.element_size() % 16:
                raise RuntimeError("strides should be multiple of 16 bytes")
        out = torch.zeros_like(hidden_states)
        for number in range(len(self.gate_up_proj)):
            token, place = torch.where(index == number)
            if not len(token):
                continue
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[number]).chunk(2, -1)
            made = F.linear(self.act_fn(gate) * up, self.down_proj[number])
            out.index_add_(0, token, made * weights[token, place, None])
        return out


class Routed(nn.Module):
    """A router, and experts: those of one tensor, a layer each, or the best one alone."""

    def __init__(self, kind: str, rng: Rng, channels: int) -> None:
        super().__init__()
        self.kind, self.count = kind, 3
        self.into, self.outof = nn.Linear(channels, 8), nn.Linear(8, channels)
        self.router = nn.Linear(8, self.count, bias=False)
        neurons = rng.choice((6, 8, 10))
        if kind in ("fused", "fused in rows"):
            self.experts: Any = Experts(self.count, 8, neurons, kind == "fused in rows")
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, neurons), nn.ReLU(), nn.Linear(neurons, 8))
                for _ in range(self.count)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        flat = h.reshape(-1, h.shape[-1])
        scores = self.router(flat).softmax(-1)
        if self.kind == "dense":
            made = sum(scores[:, i : i + 1] * e(flat) for i, e in enumerate(self.experts))
        elif self.kind == "best":
            made = self._best(flat, scores)
        else:
            weights, index = scores.topk(2, -1)
            made = self.experts(flat, index, weights)
        return self.outof(h + made.reshape(h.shape))

    def _best(self, flat: Tensor, scores: Tensor) -> Tensor:
        made, best = torch.zeros_like(flat), scores.argmax(-1)
        for i, expert in enumerate(self.experts):
            mine = best == i
            if bool(mine.any()):
                made[mine] = expert(flat[mine])
        return made


@_each("experts", ("fused", "fused in rows", "dense", "best"))
def _routed(kind: str, rng: Rng, size: Size) -> Drawn | None:
    inner = Routed(kind, rng, size.channels)
    return (Tokens(inner) if size.dims else inner), size


GROUPS = tuple(dict.fromkeys(name.split()[0] for name in UNUSUAL))


def unusual(rng: Rng, size: Size) -> tuple[str, Drawn] | None:
    """An unusual part for a map, of a group drawn first, then a kind; nothing in most places."""
    if rng.random() > OFTEN:
        return None
    group = rng.choice(GROUPS)
    name = rng.choice([name for name in UNUSUAL if name.split()[0] == group])
    made = UNUSUAL[name](rng, size)
    return None if made is None else (name, made)
