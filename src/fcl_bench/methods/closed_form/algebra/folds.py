"""Assign samples to folds by their values alone, so that the folds do not depend on the partition or the order."""

from __future__ import annotations

import numpy as np
import torch


def hash_factors(rng: np.random.Generator, inputs: int) -> torch.Tensor:
    """(d,) random odd whole numbers for `fold_numbers`."""
    return torch.from_numpy(rng.integers(-(2**62), 2**62, inputs) * 2 + 1)


def fold_numbers(samples: torch.Tensor, factors: torch.Tensor, count: int) -> torch.Tensor:
    """(n,) int64, the fold of each sample, from 0: a multilinear hash of its values.

    The values are rounded to float32, and their bits are read as integers x_j; the fold is the upper half of
    sum_j a_j x_j modulo 2^64, modulo the number of folds. Equal samples get the same fold.

    Args:
        samples: (n, d) features.
        factors: (d,) a_j, the result of `hash_factors`.
        count: the number of folds.
    """
    bits = (samples.float() + 0.0).contiguous().view(torch.int32)  # + 0.0, since zero has two signs
    hashes = (bits * factors.to(bits.device)).sum(dim=1)
    return (hashes >> 33).bitwise_and(2**31 - 1) % count
