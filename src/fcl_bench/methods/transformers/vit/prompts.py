"""A frozen vision transformer whose prompts are chosen or mixed by its features of the image without a prompt.

Prompts are prefixes: keys and values that a block's attention takes beside those of its tokens (Li and Liang, 2021).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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


class Prompts(nn.Module, ABC):
    """The prompts of a method: parameters that grow with the tasks, and how an image's prompt is made of them.

    The ViT itself is frozen, so all body parameters that train are here.

    Attributes:
        layers: the blocks, from 0, that take a prompt.
        tasks: the number of tasks that `grow` has made room for.
        penalty: the last forward pass's term of the loss, a scalar; 0 without one.
    """

    layers: tuple[int, ...]
    penalty: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tasks = 0
        self.penalty = torch.zeros(())

    @abstractmethod
    def grow(self, seed: int) -> None:
        """Add the parameters of task `self.tasks`, drawn by the seed on the CPU, and count the task.

        The caller moves them to the device of the others.
        """

    @abstractmethod
    def forward(self, queries: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """The prompt of each layer that takes one, for images with those queries.

        In train mode, methods that know the task use the last task's prompts; in evaluation mode all tasks' count.

        Args:
            queries: (b, d), constants.

        Returns:
            (b, L, d), or (1, L, d) for the same in all images; see `PrefixAttention`.
        """

    @abstractmethod
    def old(self) -> set[str]:
        """Names of the parameters of the tasks before the last, which no longer train."""


def cosines(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(b, ...) the cosine of each query (b, d) with each key (..., d), in float32 or better also under autocast."""
    dtype = torch.promote_types(queries.dtype, torch.promote_types(keys.dtype, torch.float32))
    with torch.autocast(queries.device.type, enabled=False):
        rows = nn.functional.normalize(queries.to(dtype), dim=-1), nn.functional.normalize(keys.to(dtype), dim=-1)
        return (rows[0] @ rows[1].flatten(0, -2).T).unflatten(1, keys.shape[:-1])


class PromptedViT(nn.Module):
    """Images (b, 3, size, size) to features (b, d) under their prompts.

    The query of an image is its features without a prompt, q(x). It costs a forward pass without gradients, unless
    `expect` has given it before.

    Args:
        vit: a ViT of timm without classifier; it no longer trains, and stays in evaluation mode.
        prompts: the prompts of the method; the ViT has the blocks `prompts.layers`.

    Attributes:
        last_queries: (b, d) of the last forward pass.
    """

    last_queries: torch.Tensor

    def __init__(self, vit: nn.Module, prompts: Prompts) -> None:
        super().__init__()
        self.vit = vit.requires_grad_(False)
        self.prompts = prompts
        blocks = vit.blocks
        assert isinstance(blocks, nn.Sequential)
        self._attention = {layer: PrefixAttention(blocks[layer].attn) for layer in prompts.layers}  # type: ignore[arg-type]
        for layer, attention in self._attention.items():
            blocks[layer].attn = attention
        self._expected: torch.Tensor | None = None

    @property
    def penalty(self) -> torch.Tensor:
        """What the last forward pass adds to the loss, a scalar."""
        return self.prompts.penalty

    def train(self, mode: bool = True) -> PromptedViT:
        """Switch the mode as in any module, but the ViT stays in evaluation mode."""
        super().train(mode)
        self.vit.eval()
        return self

    def expect(self, queries: torch.Tensor | None) -> None:
        """Give the queries (b, d) of the next forward pass's images; None: they are computed."""
        self._expected = queries

    @torch.no_grad()
    def queries(self, images: torch.Tensor) -> torch.Tensor:
        """(b, d) the features without any prompt."""
        return self.under({}, images)

    def forward(self, images: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
        """Images (b, 3, size, size), with or without their queries (b, d), to features (b, d)."""
        expected, self._expected = self._expected, None
        queries = expected if queries is None else queries
        self.last_queries = self.queries(images) if queries is None else queries
        return self.under(self.prompts(self.last_queries), images)

    def under(self, prompts: Mapping[int, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
        """The features (b, d) under these prompts, by layer."""
        for layer, attention in self._attention.items():
            attention.prefix = prompts.get(layer)
        try:
            return self.vit(images)
        finally:
            for attention in self._attention.values():
                attention.prefix = None
