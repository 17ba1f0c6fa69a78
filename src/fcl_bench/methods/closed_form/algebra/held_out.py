"""Squared errors of ridge regression on held-out samples, from sums over both sets of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

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
