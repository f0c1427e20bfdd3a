"""torch functions that hold several layers, as the single steps that they stand for.

`nn.MultiheadAttention` runs as one function that no interceptor looks into. Here its projections,
products and the output projection are calls of their own, and queries and keys may have another
number of channels than values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = """
query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v
add_zero_attn dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights
attn_mask use_separate_proj_weight q_proj_weight k_proj_weight v_proj_weight static_k static_v
average_attn_weights is_causal
""".split()


def in_steps(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """A call of `F.multi_head_attention_forward` in steps; None where it asks for rare things."""
    given = dict(zip(NAMES, args)) | kwargs
    rare = ("bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v")
    weight = given.get("in_proj_weight")
    if weight is None or any(given.get(n) is not None and given.get(n) is not False for n in rare):
        return None
    width = given["query"].shape[-1] // given["num_heads"]
    return attend(
        (given["query"], given["key"], given["value"]),
        (given["num_heads"], width, width, width),
        (weight, given.get("in_proj_bias")),
        (given["out_proj_weight"], given.get("out_proj_bias")),
        dropout=given["dropout_p"] if given.get("training", True) else 0.0,
        padding=given.get("key_padding_mask"),
        mask=given.get("attn_mask"),
        weights=given.get("need_weights", True),
        average=given.get("average_attn_weights", True),
    )


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    sizes: Sequence[int],
    projection: tuple[Tensor, Tensor | None],
    output: tuple[Tensor, Tensor | None],
    *,
    dropout: float = 0.0,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    weights: bool = False,
    average: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention of (length, batch, width) inputs, or (length, width) without a batch.

    `sizes` are heads, channels of queries and keys, channels of values, and the channels a query
    had before any were pruned, by which products are scaled.
    """
    heads, channels, of_values, before = sizes
    batched = inputs[0].dim() == 3
    parts = [heads * channels, heads * channels, heads * of_values]
    query, key, value = inputs
    if query is key and key is value:
        q, k, v = F.linear(query, *projection).split(parts, -1)
    else:  # one weight for all three, so that it is one layer
        q = F.linear(query, *projection).split(parts, -1)[0]
        k = F.linear(key, *projection).split(parts, -1)[1]
        v = F.linear(value, *projection).split(parts, -1)[2]
    q, k, v = (_by_head(x if batched else x.unsqueeze(1), heads) for x in (q, k, v))
    added = _mask(padding, mask, q, k)
    scale = before**-0.5
    attention: Tensor | None = None
    if weights:
        scores = torch.matmul(q * scale, k.transpose(-2, -1))
        attention = F.softmax(scores if added is None else scores + added, dim=-1)
        attention = F.dropout(attention, dropout)
        out = torch.matmul(attention, v)
        attention = attention.mean(1) if average else attention
        attention = attention if batched else attention.squeeze(0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, added, dropout, scale=scale)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), *output)
    return (out if batched else out.squeeze(1)), attention


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(length, batch, heads · channels) → (batch, heads, length, channels)."""
    return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _mask(padding: Tensor | None, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks as one that is added to products; None where there is none."""
    added = None
    if mask is not None:
        added = _additive(mask, q)
        if added.dim() == 3:  # one for every head of every example
            added = added.reshape(q.shape[0], -1, *added.shape[1:]) if len(added) > 1 else added
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
        hidden = _additive(padding, q)[:, None, None]
        added = hidden if added is None else added + hidden
    return added


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


DECOMPOSITIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: in_steps
}
"""Function → what computes the same in steps of its arguments, or gives None."""
