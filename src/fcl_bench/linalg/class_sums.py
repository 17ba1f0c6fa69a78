"""Sums of samples by class."""

from __future__ import annotations

import torch


def add_class_sums(sums: torch.Tensor, H: torch.Tensor, which: torch.Tensor) -> None:
    """sums[c] += the sum of the rows of H with which = c, in place: one pass over H, where H'Y takes one per class.

    Args:
        sums: (c, M).
        H: (n, M).
        which: (n,) int64, the class of each row.
    """
    if H.is_cuda:
        # index_add_ is not deterministic there, and a matrix product costs little.
        sums.addmm_(torch.nn.functional.one_hot(which, len(sums)).to(H).T, H)
    else:
        sums.index_add_(0, which, H)


def class_sums(H: torch.Tensor, which: torch.Tensor, classes: int) -> torch.Tensor:
    """C = H'Y (M, classes) for the one-hot Y of `which`; see `add_class_sums`."""
    sums = H.new_zeros(classes, H.shape[1])
    add_class_sums(sums, H, which)
    return sums.T
