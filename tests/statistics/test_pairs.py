"""Moments of products of queries and keys by their definition, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lbyl
from support.attention import KNOWS_GROUPS, block

SCALE = 0.3


class Scaled(nn.Module):
    """Queries and keys weighed by their places, a scale and a mask of the caller's."""

    def __init__(self, masked: str, scale: float | None, heads: int = 2, keys: int = 2) -> None:
        super().__init__()
        self.masked, self.scale, self.each = masked, scale, heads // keys
        self.q, self.k, self.v = (nn.Linear(8, 4 * n) for n in (heads, keys, keys))
        self.out = nn.Linear(4 * heads, 3)

    def qk(self, x: Tensor) -> tuple[Tensor, Tensor]:
        by_place = 1 + torch.arange(x.shape[1]).to(x)[:, None] / 7
        q, k = (y(x).unflatten(-1, (-1, 4)).transpose(1, 2) * by_place for y in (self.q, self.k))
        return q, k

    def mask(self, x: Tensor) -> Tensor | None:
        n = x.shape[1]
        hidden = torch.ones(n, n).triu(1).bool()
        hidden[1] = self.masked == "flags"  # the second may look at nothing
        added = torch.linspace(-1, 1, n * n).reshape(n, n).double()
        of_each = (hidden | (x[:, None, :, 0] > 0.5)).repeat_interleave(2, 0)
        masks = {"flags": ~hidden, "numbers": added.masked_fill(hidden, -2e8), "flat": ~of_each}
        return masks.get(self.masked)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x)
        v = self.v(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        options: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        if self.masked == "written":
            y = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        elif self.masked == "flat":  # heads and batch in one
            flat = (part.flatten(0, 1) for part in (q, k, v))
            y = F.scaled_dot_product_attention(*flat, self.mask(x), **options).view_as(q)
        else:
            if self.each > 1 and not KNOWS_GROUPS:
                k, v = (part.repeat_interleave(self.each, 1) for part in (k, v))
            elif self.each > 1:
                options["enable_gqa"] = True
            y = F.scaled_dot_product_attention(q, k, v, self.mask(x), **options)
        return self.out(y.nan_to_num().transpose(1, 2).flatten(2))


def gram_of(q: Tensor, k: Tensor, logits: Tensor, pairs: list[list[int]]) -> Tensor:
    """The mean over sequences of the weighted scatter of products about their mean, by head."""
    straight = torch.stack([(q[..., :, None, p] * k[..., None, :, p]).sum(-1) for p in pairs], -1)
    features = straight
    if len(pairs[0]) == 2:
        across = [
            q[..., :, None, a] * k[..., None, :, b] - q[..., :, None, b] * k[..., None, :, a]
            for a, b in pairs
        ]
        features = torch.cat([straight, torch.stack(across, -1)], -1)
    is_open = logits > -1e8
    even = is_open / is_open.sum(-1, keepdim=True).clamp(min=1)
    weight = (logits.softmax(-1).nan_to_num() + even) / 2
    off = features - (weight[..., None] * features).sum(-2, keepdim=True)
    return torch.einsum("bhij,bhijf,bhijg->hfg", weight, off, off) / len(q)


def moments_of(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    """Of own inputs alone: what data-free ones are blended in for is taken out again."""
    found, free = (
        lbyl.prepare(model, batches[0], include="*:qk", data=data).statistics()
        for data in (list(batches), None)
    )
    count = sum(map(len, batches))
    ((name, both),) = found.products.items()
    return {
        part: torch.lerp(getattr(free.products[name], part), getattr(both, part), 1 + 64 / count)
        for part in ("gram", "query", "key")
    }


def assert_second_moments(found: Any, q: Tensor, k: Tensor) -> None:
    centred = k - k.mean(2, keepdim=True)
    for name, x in (("query", q), ("key", centred)):
        wanted = torch.einsum("bhid,bhie->hde", x, x) / (len(x) * x.shape[2])
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("masked", "scale", "heads", "keys", "count"),
    [
        (masked, scale, 2, 2, 20)
        for masked in ("none", "flags", "numbers")
        for scale in (None, SCALE)
    ]
    + [("flat", None, 2, 2, 20), ("written", None, 2, 2, 20)]
    + [("none", None, 6, 3, 20), ("flags", SCALE, 8, 4, 8)],
)
def test_products_scatter_as_defined_under_every_mask(
    masked: str, scale: float | None, heads: int, keys: int, count: int
) -> None:
    model, x = Scaled(masked, scale, heads, keys).double(), torch.randn(count, 6, 8).double()
    found = moments_of(model, x)
    with torch.no_grad():
        q, k = model.qk(x)
        k = k.repeat_interleave(heads // keys, 1)
        logits, mask = q @ k.mT * (scale or 0.5), model.mask(x)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.unflatten(0, (-1, 2)) if mask.dim() > 2 else mask
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    assert_second_moments(found, q, k)
    wanted = gram_of(q, k, logits, [[0], [1], [2], [3]])
    torch.testing.assert_close(found["gram"], wanted, rtol=1e-4, atol=1e-4)


def test_channels_of_rotary_embeddings_are_pairs_and_fewer_keys_serve_several_queries() -> None:
    model, _ = block("rotary")
    x = torch.randn(20, 6, 8).double()
    found = moments_of(model, x)
    own: Any = model.attention
    with torch.no_grad():
        y = model.norm(model.inner(x))
        q, k = (p(y).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (own.q, own.k))
        q, k = own.turned(q), own.turned(k).repeat_interleave(2, 1)
    causal = torch.ones(6, 6).triu(1).bool()
    logits = (q @ k.mT * 0.5).masked_fill(causal, -torch.inf)
    assert_second_moments(found, q, k)
    wanted = gram_of(q, k, logits, [[0, 2], [1, 3]])
    torch.testing.assert_close(found["gram"], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["kernel", "written", "einsum"])
def test_queries_and_keys_are_found_however_they_are_multiplied(kind: str) -> None:
    model, _ = block(kind)
    x = torch.randn(20, 6, 8).double()
    found = moments_of(model, x)
    assert found["gram"].numel() == 0  # second moments say it all
    own: Any = model.attention
    with torch.no_grad():
        y = model.norm(model.inner(x))
        made = own.qkv(y).chunk(3, -1) if kind == "written" else (own.q(y), own.k(y))
        q, k = (p.unflatten(-1, (3, 4)).transpose(1, 2) for p in made[:2])
    assert_second_moments(found, q / 2 if kind == "written" else q, k)


def test_of_many_sequences_some_are_looked_at_and_all_counted() -> None:
    """The first of them, which are all the same here: it makes no difference which."""
    model, one = Scaled("flags", None).double(), torch.randn(1, 6, 8).double()
    few, first, others = one.repeat(20, 1, 1), one.repeat(40, 1, 1), torch.randn(16, 6, 8).double()
    found = moments_of(model, first, others)
    torch.testing.assert_close(found["gram"], moments_of(model, few)["gram"], rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert_second_moments(found, *model.qk(torch.cat([first, others])))
