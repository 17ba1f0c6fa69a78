"""Terms of the loss of made-up images, and of a network's outputs on them (ABD; Smith et al., ICCV 2021)."""

from __future__ import annotations

import math

import torch

#: Side of the kernel of `blurred`; images are mirrored at their borders.
BLUR = 5


def imbalance(scores: torch.Tensor) -> torch.Tensor:
    """1 + sum_c p_c log p_c / log C, p the mean of the softmax of `scores` (b, C) over the batch.

    It is 0 if the batch has every class alike, 1 if it has one class alone, and 0 if C is 1.
    """
    classes = scores.shape[1]
    if classes < 2:
        return scores.new_zeros(())
    p = scores.softmax(dim=1).mean(dim=0).clamp(min=torch.finfo(scores.dtype).tiny)
    return 1 + (p * p.log()).sum() / math.log(classes)


def blurred(images: torch.Tensor, sigma: float = 1.0) -> torch.Tensor:
    """Images (b, 3, h, w), of at least 3 pixels a side, after a Gaussian of width `sigma` over 5 x 5 pixels."""
    down, across = (_blur(size, sigma, images) for size in images.shape[2:])
    # Two products with small matrices are several times faster than a convolution of 3 separate channels.
    return down @ images @ across.T


def _blur(size: int, sigma: float, like: torch.Tensor) -> torch.Tensor:
    """(size, size): what each blurred pixel of a line takes of every pixel."""
    away = torch.arange(BLUR, device=like.device) - BLUR // 2
    weights = torch.exp(-away.to(like.dtype).square() / (2 * sigma**2))
    last = size - 1
    source = last - (last - (torch.arange(size, device=like.device)[:, None] + away).abs()).abs()
    matrix = like.new_zeros(size, size)
    return matrix.scatter_add_(1, source, (weights / weights.sum()).expand(size, BLUR))
