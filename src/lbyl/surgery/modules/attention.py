"""`nn.MultiheadAttention` with heads of any size.

torch's own takes its sizes from the width of its input.
"""

from __future__ import annotations

from torch import Tensor, nn

from lbyl.runtime.decompose import attend

SIZES = "head_sizes"  # the buffer: heads, channels of queries and keys, of values, and before


class SlimMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with fewer heads, or fewer channels in them, than its width asks for.

    The buffer `head_sizes` holds heads, channels of queries and keys, channels of values, and the
    channels before any were pruned.
    """

    head_sizes: Tensor

    @staticmethod
    def of(module: nn.MultiheadAttention, sizes: Tensor) -> None:
        """Make an attention one with these sizes, in place."""
        module.__class__ = SlimMultiheadAttention
        module._buffers[SIZES] = sizes
        module.refit()  # type: ignore[operator]

    def refit(self) -> None:
        """Attributes by the sizes; they also keep torch's kernels for whole layers away."""
        self._sizes = [int(n) for n in self.head_sizes]
        self.num_heads, self.head_dim = self._sizes[:2]
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        inputs, turned = (query, key, value), self.batch_first and query.dim() == 3
        if turned:
            same = query is key and key is value
            first = query.transpose(0, 1)
            inputs = (first,) * 3 if same else tuple(x.transpose(0, 1) for x in inputs)  # type: ignore[assignment]
        assert self.in_proj_weight is not None
        out, weights = attend(
            inputs,
            self._sizes,
            (self.in_proj_weight, self.in_proj_bias),
            (self.out_proj.weight, self.out_proj.bias),
            dropout=self.dropout if self.training else 0.0,
            padding=key_padding_mask,
            mask=attn_mask,
            weights=need_weights,
            average=average_attn_weights,
        )
        return (out.transpose(0, 1) if turned else out), weights

    def extra_repr(self) -> str:
        heads, channels, of_values, _ = self._sizes
        return f"heads={heads}, query_channels={channels}, value_channels={of_values}"
