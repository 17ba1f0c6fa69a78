"""A ViT under prompts, image by image in float64, and prompts that are chosen in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import torch

from tests.training.vit.test_prefix import naive_attention


def naive_features(vit, images, prompts):
    """(b, d) of timm's ViT; `prompts` by layer: (b, L, d) in float64, half of the rows keys and half values."""
    wide = copy.deepcopy(vit).double().eval()
    found = []
    for i, image in enumerate(images.double()):
        x = wide.patch_embed(image[None])
        x = torch.cat([wide.cls_token, x], dim=1) + wide.pos_embed
        for layer, block in enumerate(wide.blocks):
            attention = getattr(block.attn, "attention", block.attn)
            prefix = prompts.get(layer)
            rows = torch.zeros(1, 0, x.shape[2]) if prefix is None else prefix[i : i + 1]
            x = x + naive_attention(attention, block.norm1(x), rows)
            x = x + block.mlp(block.norm2(x))
        found.append(wide.norm(x)[0, 0])
    return torch.stack(found)


def naive_cosine(a, b) -> float:
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float((a * b).sum() / np.sqrt((a * a).sum()) / np.sqrt((b * b).sum()))
