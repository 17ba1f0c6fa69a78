"""The parts of timm's vision transformers that prompts and low-rank updates are put into."""

from __future__ import annotations

import torch
from torch import nn

from fcl_bench.errors import UserError


def transformer_blocks(vit: nn.Module, method: str, backbone: str) -> list[nn.Module]:
    """The blocks of a ViT, each with timm's `Attention` as `attn`.

    Args:
        vit: a network of any kind.
        method, backbone: the names of what asks, and of the network, for messages.

    Raises:
        UserError: it has no such blocks.
    """
    from timm.models.vision_transformer import Attention

    blocks = getattr(vit, "blocks", None)
    found = list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else []
    if not found or not all(isinstance(getattr(block, "attn", None), Attention) for block in found):
        raise UserError(
            f"method={method} works inside a vision transformer, and {backbone} is none",
            "backbone=vit_b16, backbone=vit_32, or backbone=tiny backbone.architecture=vit",
        )
    return found


def require_layers(key: str, layers: list[int], blocks: int) -> None:
    """Raise a `UserError` for layers, numbered from 0, that a network of so many blocks does not have, or twice."""
    if not layers or min(layers) < 0 or max(layers) >= blocks or len(set(layers)) < len(layers):
        raise UserError(f"{key}={layers} for a network of {blocks} blocks", f"distinct numbers from 0 to {blocks - 1}")


def dimension_of(block: nn.Module) -> int:
    """d, the numbers of a token."""
    weight = block.attn.qkv.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    return weight.shape[1]
