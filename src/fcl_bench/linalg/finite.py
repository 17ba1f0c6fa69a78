"""Whether numbers are finite."""

from __future__ import annotations

import torch


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is."""
    # A sum has whatever infinity or NaN its terms have, and takes a twentieth of the time of a look at each of them. A
    # sum of finite terms may overflow all the same, so that only then each is looked at.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
