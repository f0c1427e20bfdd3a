"""Small attentions, each written another way, and what a cut of their units must equal."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl

WIDTH, HEADS, SIZE = 12, 3, 4
KNOWS_GROUPS = "enable_gqa" in str(F.scaled_dot_product_attention.__doc__)  # not in torch 2.4


class Kernel(nn.Module):
    """Separate layers and torch's kernel, sizes by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Written(nn.Module):
    """One layer for all three, both products and softmax written out, sizes in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * SIZE**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, HEADS * SIZE))


class Einsum(nn.Module):
    """The products as einsum, with heads behind positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)) for layer in (self.q, self.k, self.v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).div(2).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class Rotary(nn.Module):
    """Two query heads for each key head, and rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 4 * SIZE, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, 2 * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(4 * SIZE, WIDTH, bias=False)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.1]).to(x)
        angle = torch.cat([angle, angle], -1)
        half = x.shape[-1] // 2
        other = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angle.cos() + other * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, SIZE).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = self.turned(q), self.turned(k)
        if not KNOWS_GROUPS:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        groups = {"enable_gqa": True} if KNOWS_GROUPS else {}
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **groups)
        return self.out(y.transpose(1, 2).flatten(2))


class Torch(nn.Module):
    """torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Crossed(nn.Module):
    """torch's own module between two sequences, weights asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        hidden = torch.zeros(x.shape[1], 3, dtype=torch.bool)
        hidden[:, 1] = True
        out: Tensor = self.attention(x, x[:3], x[:3], key_padding_mask=hidden)[0]
        return out.transpose(0, 1)


KINDS = {"kernel": Kernel, "written": Written, "einsum": Einsum, "rotary": Rotary}
KINDS |= {"torch": Torch, "crossed": Crossed}


class Block(nn.Module):
    """An attention in a residual block, with a layer before and behind."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.head(x + self.attention(self.norm(x)))


def block(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A block in float64 with one of the attentions, and inputs for it."""
    torch.manual_seed(seed)
    model = Block(KINDS[kind]()).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model, torch.randn(6, 7, 8).double()


def silenced(model: nn.Module, graph: lbyl.Graph, kept: Mapping[str, Tensor]) -> nn.Module:
    """The original with pruned columns of consumers, and pruned rows of queries, zero."""
    quiet = copy.deepcopy(model)
    state = dict(quiet.named_parameters(remove_duplicate=False))
    gone = {
        unit.start + channel
        for unit in graph
        if unit.name in kept
        for channel in set(range(unit.channels)) - set(kept[unit.name].tolist())
    }
    with torch.no_grad():
        for consumer in graph.consumers.values():
            _silence(state[consumer.weight].movedim(consumer.axis, 0), consumer.channel, gone)
        for unit in graph:
            for made in unit.producers if unit.kind == "qk" else ():
                own = gone & set(unit.range)
                channel = graph.axes[made.weight, made.axis]
                _silence(state[made.weight].movedim(made.axis, 0), channel, own)
                if made.bias is not None:
                    _silence(state[made.bias], channel, own)
    return quiet


def _silence(rows: Tensor, channel: Tensor, gone: set[int]) -> None:
    """Make rows zero of which any channel is gone; each has one, or one and a head."""
    for row, own in zip(rows, channel.reshape(len(channel), -1).tolist()):
        if gone & set(own):
            row.zero_()
