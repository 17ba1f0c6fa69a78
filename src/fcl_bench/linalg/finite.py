"""Whether numbers are finite."""

from __future__ import annotations

import torch

#: Numbers up to which to copy a tensor takes less time than a sum of its own.
_SMALL = 4096


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether every value of every one of these is."""
    # A sum has whatever infinity or NaN its terms have, and takes a twentieth of the time of a look at each of them. A
    # sum of finite terms may overflow all the same, so that only then each is looked at.
    small: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        # Most tensors of a network are vectors of a few numbers. A client may have made one or two on the CPU all the
        # same, and tensors of two devices can't be joined; but their sums can be added.
        if tensor.numel() <= _SMALL and tensor.device == tensors[0].device:
            small.append(tensor.flatten())
        else:
            sums.append(tensor.sum())
    total = sum(sums, start=torch.cat(small).sum() if small else 0)
    return bool(torch.isfinite(torch.as_tensor(total))) or all(bool(torch.isfinite(own).all()) for own in tensors)
