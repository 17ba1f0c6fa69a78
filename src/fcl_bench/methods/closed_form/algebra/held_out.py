"""Squared errors of ridge regression on held-out samples, from sums over both sets of samples.

Samples are assigned to folds by their values alone, so that folds do not depend on the partition or the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


#: Errors that differ by less than this share of the sum of the squared labels count as equal: this is rounding.
_ROUNDING = 2.0**-44


class Sums(NamedTuple):
    """The sums of a set of samples H (n, M) with one-hot labels Y (n, C).

    Attributes:
        G: (M, M) H'H.
        S: (M, C) H'Y.
        samples: n, which is also the sum of the squared labels.
    """

    G: torch.Tensor
    S: torch.Tensor
    samples: int


def added(parts: Sequence[Sums]) -> Sums:
    """The sums of all parts' samples together."""
    first, *others = parts
    G, S, samples = first.G.double(), first.S.double(), first.samples
    for part in others:
        G, S, samples = G + part.G, S + part.S, samples + part.samples
    return Sums(G, S, samples)


def squared_error(W: torch.Tensor, held: Sums) -> float:
    """sum_i |y_i - W'h_i|^2 = tr(W'G W) - 2 tr(W'S) + n over the samples of `held`, for W (M, C)."""
    return float((W * (held.G @ W - 2 * held.S)).sum()) + held.samples


def held_out_errors(training: Sums, held: Sums, ridges: Sequence[float]) -> torch.Tensor:
    """(k,) the squared errors on `held` of W = (G + lambda I)^-1 S on `training`, one per ridge lambda above 0.

    One eigendecomposition G = U diag(l) U' serves all ridges, and everything is rotated by U first: U'W is
    (l + lambda)^-1 U'S.
    """
    values, U = torch.linalg.eigh(training.G.double())
    values = values.clamp_min(0).unsqueeze(1)  # below zero is rounding
    S = U.T @ training.S.double()
    turned = Sums(U.T @ held.G.double() @ U, U.T @ held.S.double(), held.samples)
    errors = [squared_error(S / (values + ridge), turned) for ridge in ridges]
    return torch.tensor(errors, dtype=torch.float64)


def cross_validated(parts: Sequence[Sums], ridges: Sequence[float]) -> torch.Tensor:
    """(k,) the squared errors on every part of the ridge regression on all other parts, summed over the parts."""
    total = torch.zeros(len(ridges), dtype=torch.float64)
    for number, held in enumerate(parts):
        if held.samples:
            total += held_out_errors(added([*parts[:number], *parts[number + 1 :]]), held, ridges)
    return total


def least(errors: torch.Tensor, samples: int) -> int:
    """The index of the smallest error (k,), a sum over `samples` samples; the first of those equal to rounding."""
    return int((errors <= errors.min() + _ROUNDING * samples).nonzero()[0])
