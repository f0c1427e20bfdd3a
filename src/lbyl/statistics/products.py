"""Moments of the products of queries and keys, by which attention weighs what it mixes.

A logit is a sum over channels, so a pruned channel is missed by as much as its products carried
that those of the others do not. Softmax takes no notice of what all keys share, so products are
centred over the keys of each query. Half of the weight is spread over all keys that a query may
look at, half goes where it looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lbyl.graph.unit import Graph, Unit
from lbyl.runtime.processes import gathered

QUERIES = 32  # of each sequence that are looked at, at places of its own
SEQUENCES = 32  # whose products are looked at; more change nothing
AT_ONCE = 1 << 24  # products in memory; no result depends on it
OPERANDS = {  # by position; the last two are multiplied
    "scaled_dot_product_attention": ("query", "key"),
    "matmul": ("input", "other"),
    "__matmul__": ("input", "other"),
    "bmm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
}
FUNCTIONS = (*OPERANDS, "einsum")


@dataclass(frozen=True)
class ProductMoments:
    """Of one attention, by head.

    `gram` (heads, features, features) are second moments of what channels add to a logit, centred
    over keys. Channels of one index have one feature. Where rotary embeddings make pairs of indices
    each has two: its products, and those with one of the pair turned by 90°, 0 where it is none.
    `query` and `key` (heads, channels, channels) are second moments of queries and covariances of
    keys.
    """

    gram: Tensor
    query: Tensor
    key: Tensor

    def blended(self, other: ProductMoments, weight: float) -> ProductMoments:
        """These times `weight` and others of the same attention for the rest."""
        mine, theirs = ((p.gram, p.query, p.key) for p in (self, other))
        return ProductMoments(*(torch.lerp(b, a, weight) for a, b in zip(mine, theirs)))


def pairs_of(graph: Graph, unit: Unit) -> Tensor:
    """(heads, channels of a block, most places): the places in a head that form each channel.

    Rotary embeddings make pairs of places, of all or, with single ones beside them, of some. A
    channel of fewer places than others has −1 in the rest.
    """
    facts = unit.attention
    assert facts is not None
    axis = next(p.axis for p in unit.producers if p.weight == facts.query_weight)
    channel = unit.local(graph.axes[facts.query_weight, axis])[facts.query]  # (heads, places)
    made = [[torch.nonzero(row == c).reshape(-1) for c in torch.unique(row)] for row in channel]
    flat = [places for head in made for places in head]
    padded = torch.nn.utils.rnn.pad_sequence(flat, batch_first=True, padding_value=-1)
    return padded.unflatten(0, (len(channel), -1))


def are_pairs(places: Tensor) -> Tensor:
    """Whether channels, given by their places (…, most places), have two of them."""
    return (places >= 0).sum(-1) == 2


def query_and_key(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], heads: int, width: int
) -> tuple[Tensor, Tensor] | None:
    """Queries (batch, heads, length, channels) and keys of a product; None where it is another."""
    q: Any
    k: Any
    if name == "einsum":
        spelled, operands = args[0].replace(" ", ""), args[1:]
        operands = operands[0] if len(operands) == 1 else operands  # as one list
        (a, b), out = spelled.partition("->")[0].split(","), spelled.partition("->")[2]
        summed = next(x for x in a if x in b and x not in out)
        shared = [x for x in a if x in b and x != summed]
        own = [next(x for x in word if x not in shared and x != summed) for word in (a, b)]
        q, k = (
            x.permute([w.index(letter) for letter in (*shared, o, summed)])
            for x, w, o in zip(operands, (a, b), own)
        )
    else:
        given = dict(zip(OPERANDS[name], args)) | kwargs
        q, k = (given[operand] for operand in OPERANDS[name][-2:])
        k = k if name == "scaled_dot_product_attention" else k.transpose(-2, -1)
    if q.shape[-1] != width or k.shape[-1] != width or q.dim() < 3:
        return None
    if k.shape[-3] != q.shape[-3] and q.shape[-3] % k.shape[-3] == 0:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    lead = q.shape[:-2]
    k = k.expand(*lead, *k.shape[-2:])
    if lead.numel() % heads:
        return None
    return q.reshape(-1, heads, *q.shape[-2:]), k.reshape(-1, heads, *k.shape[-2:])


def allowed_keys(
    args: Sequence[Any], kwargs: dict[str, Any], shape: torch.Size, heads: int
) -> Tensor | None:
    """What a kernel adds to logits (batch, heads, queries, keys); None where nothing."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args))
    given |= kwargs
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor):
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
        lead = given["query"].shape[:-2]
        if len(lead) != 2:  # windows beside the batch, or heads and batch in one
            mask = mask.expand(*lead, *mask.shape[-2:]).reshape(-1, heads, *mask.shape[-2:])
        return mask.float()
    if given.get("is_causal"):
        keep = torch.ones(shape[-2:], dtype=torch.bool).tril()
        return torch.zeros(shape[-2:]).masked_fill(~keep, -torch.inf)
    return None


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Of x (batch, heads, length, …) the places (batch, some) of each sequence."""
    return torch.stack([own[:, some] for own, some in zip(x, places)])


@dataclass
class ProductSums:
    """Streaming sums of one attention's products."""

    pairs: Tensor  # (heads, channels, most places), −1 where there are fewer
    plain: bool
    gram: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    count: int = 0
    seen: int = 0  # sequences whose products are in `gram`

    def add(
        self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float, generator: torch.Generator
    ) -> None:
        """Take queries and keys (batch, heads, length, channels) in."""
        q, k = q.detach(), k.detach()
        self._second_moments(q.float(), k.float())
        missing = max(0, SEQUENCES - self.seen)
        if self.plain or not missing:
            return
        chosen = torch.randperm(len(q), generator=generator)[:missing].sort().values.to(q.device)
        if mask is not None:
            mask = mask.to(q.device).reshape(*[1] * (4 - mask.dim()), *mask.shape)
            mask = mask[chosen] if len(mask) == len(q) else mask.expand(len(chosen), -1, -1, -1)
            mask = mask.expand(-1, -1, q.shape[2], k.shape[2])
        q, k = q[chosen].float(), k[chosen].float()
        self.seen += len(q)
        # Each sequence has places of its own: a batch of many would know few otherwise.
        places = [
            torch.randperm(q.shape[2], generator=generator)[:QUERIES].sort().values for _ in q
        ]
        some = torch.stack(places).to(q.device)
        q = _taken(q, some)
        mask = None if mask is None else _taken(mask, some)
        size = math.prod((*q.shape[1:3], k.shape[2], *self.pairs.shape[1:]))
        at_once = max(1, AT_ONCE // max(size, 1))  # no result depends on it
        for part in range(0, len(q), at_once):
            stretch = slice(part, part + at_once)
            own = None if mask is None else mask[stretch]
            self._products(q[stretch], k[stretch], own, scale)

    def sum_over_processes(self) -> None:
        """Add what other processes have seen."""
        self.count, self.seen = sum(gathered(self.count)), sum(gathered(self.seen))
        for name in ("gram", "query", "key"):
            own: Tensor | None = getattr(self, name)
            parts = gathered(None if own is None else own.cpu())
            known = [part for part in parts if part is not None]
            if known:
                total = torch.stack(known).sum(0)
                setattr(self, name, total if own is None else total.to(own))

    def _second_moments(self, q: Tensor, k: Tensor) -> None:
        queries = torch.einsum("bhid,bhie->hde", q, q).double() / q.shape[2]
        centred = k - k.mean(2, keepdim=True)
        keys = torch.einsum("bhid,bhie->hde", centred, centred).double() / k.shape[2]
        self.query = queries if self.query is None else self.query + queries
        self.key = keys if self.key is None else self.key + keys
        self.count += len(q)

    def _products(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> None:
        logits = (q @ k.transpose(-2, -1)) * scale
        logits = logits if mask is None else logits + mask
        open_keys = torch.isfinite(logits) & (logits > -1e8)
        even = open_keys / open_keys.sum(-1, keepdim=True).clamp(min=1)
        weight = (logits.softmax(-1).nan_to_num() + even) / 2  # (b, h, i, j)
        features = self.features(q, k)  # (b, h, i, j, f)
        mean = (weight[..., None] * features).sum(-2, keepdim=True)
        centred = (features - mean) * weight.sqrt()[..., None]
        rows = centred.movedim(1, 0).flatten(1, 3)  # (h, b · i · j, f)
        gram = (rows.transpose(1, 2) @ rows).double()
        self.gram = gram if self.gram is None else self.gram + gram

    def features(self, q: Tensor, k: Tensor) -> Tensor:
        """(b, h, i, j, f): what each channel adds to logits, then the same for turned pairs."""
        heads = torch.arange(q.shape[1])[:, None, None]
        pairs = self.pairs
        there = (pairs >= 0).to(q.device)

        def at(x: Tensor) -> Tensor:  # (b, h, length, channels, places)
            picked = x.movedim(1, 0).movedim(-1, 1)[heads, pairs.clamp(min=0)]  # (h, c, p, b, len)
            return (picked * there[..., None, None]).permute(3, 0, 4, 1, 2)

        a, b = at(q)[:, :, :, None], at(k)[:, :, None]
        straight = (a * b).sum(-1)
        if pairs.shape[2] == 1:
            return straight
        turned = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
        turned = turned * are_pairs(pairs).to(turned)[:, None, None]
        return torch.cat([straight, turned], -1)

    def moments(self) -> ProductMoments | None:
        """What was measured, None where nothing was."""
        if self.query is None or self.key is None:
            return None
        gram = self.query.new_zeros(0) if self.gram is None else self.gram / self.seen
        return ProductMoments(gram, self.query / self.count, self.key / self.count)
