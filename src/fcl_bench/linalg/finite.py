"""Whether numbers are finite."""

from __future__ import annotations

import torch

#: Numbers up to which to copy a tensor takes less time than a sum of its own.
_SMALL = 4096


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether every value of every one of these is."""
    # A sum has whatever infinity or NaN its terms have, and takes a twentieth of the time of a look at each of them. A
    # sum of finite terms may overflow all the same, so that only then each is looked at.
    small = [tensor.flatten() for tensor in tensors if tensor.numel() <= _SMALL]
    sums = [tensor.sum() for tensor in tensors if tensor.numel() > _SMALL]
    # Most tensors of a network are vectors of a few numbers.
    total = sum(sums, start=torch.cat(small).sum() if small else 0)
    return bool(torch.isfinite(torch.as_tensor(total))) or all(bool(torch.isfinite(own).all()) for own in tensors)
