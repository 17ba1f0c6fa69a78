"""What made-up images, and a network's outputs on them, are asked for (ABD; Smith et al., ICCV 2021)."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import conv2d, pad

#: Side of the kernel of `blurred`; images are mirrored at their borders by half of it.
BLUR = 5


def imbalance(scores: torch.Tensor) -> torch.Tensor:
    """1 + sum_c p_c log p_c / log C, p the mean of the softmax of `scores` (b, C) over the batch.

    0 where the batch has every class alike, 1 where it has one class alone; 0 of a single class.
    """
    classes = scores.shape[1]
    if classes < 2:
        return scores.new_zeros(())
    p = scores.softmax(dim=1).mean(dim=0).clamp(min=torch.finfo(scores.dtype).tiny)
    return 1 + (p * p.log()).sum() / math.log(classes)


def blurred(images: torch.Tensor, sigma: float = 1.0) -> torch.Tensor:
    """Images (b, 3, h, w), of at least 3 pixels a side, after a Gaussian of width `sigma` over 5 x 5 pixels."""
    away = torch.arange(BLUR, dtype=images.dtype, device=images.device) - BLUR // 2
    line = torch.exp(-away.square() / (2 * sigma**2))
    kernel = torch.outer(line, line) / line.sum() ** 2
    channels = images.shape[1]
    mirrored = pad(images, (BLUR // 2,) * 4, mode="reflect")
    return conv2d(mirrored, kernel.expand(channels, 1, BLUR, BLUR), groups=channels)
