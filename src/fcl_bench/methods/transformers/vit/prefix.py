"""Prefix tuning: keys and values that a block's attention takes beside those of its tokens (Li and Liang, 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from timm.models.vision_transformer import Attention


class PrefixAttention(nn.Module):
    """timm's attention with keys [P_K; W_K h] and values [P_V; W_V h]; queries are those of the tokens h alone.

    The prompt enters after the projections, so the number of tokens does not change.

    Args:
        attention: the attention of a block; it does not change.

    Attributes:
        prefix: (b, L, d), or (1, L, d) for the same prompt in all images: P_K are its first L/2 rows, P_V the others.
            None: the attention as it was, bit for bit.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.prefix: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, *masks: object, **others: object) -> torch.Tensor:
        """Tokens (b, N, d) to tokens (b, N, d). Further arguments of timm's blocks are for masks."""
        own = self.attention
        if self.prefix is None:
            return own(x, *masks, **others)
        batch, tokens, _ = x.shape
        query, key, value = own.qkv(x).reshape(batch, tokens, 3, own.num_heads, own.head_dim).permute(2, 0, 3, 1, 4)
        first, second = (self._by_head(half, batch) for half in self.prefix.to(x.dtype).chunk(2, dim=1))
        query, key = own.q_norm(query), own.k_norm(key)
        key, value = torch.cat([first.to(key.dtype), key], dim=2), torch.cat([second.to(value.dtype), value], dim=2)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=own.scale)
        mixed = mixed.transpose(1, 2).flatten(2)
        # Newer versions of timm can normalise and gate the heads' outputs.
        if (norm := getattr(own, "norm", None)) is not None:
            mixed = norm(mixed)
        if (gate := getattr(own, "gate", None)) is not None:
            mixed = mixed * gate(x).sigmoid()
        return own.proj_drop(own.proj(mixed))

    def _by_head(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """(b or 1, L/2, d) to (b, heads, L/2, d/heads)."""
        own = self.attention
        return rows.expand(batch, -1, -1).unflatten(2, (own.num_heads, own.head_dim)).transpose(1, 2)
