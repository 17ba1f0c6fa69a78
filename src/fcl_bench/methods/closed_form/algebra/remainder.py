"""Replaces the part that low-rank sketches dropped, in the shape of a covariance known from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fcl_bench.linalg.gram import product
from fcl_bench.linalg.spectral import Spectrum, summarise


def deviations(H: torch.Tensor, which: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """A (n, M): the rows of H (n, M) minus the mean of their class, for the class sums (M, c) of H by `which` (n,)."""
    means = sums / torch.bincount(which, minlength=sums.shape[1]).clamp_min(1)
    return H - means.T[which]


def noise_level(A: torch.Tensor, sigma: torch.Tensor) -> float:
    """tau, the mean of the eigenvalues of A'A that a sketch with singular values `sigma` drops."""
    others = A.shape[1] - len(sigma)
    dropped = float(A.square().sum() - sigma.square().sum())
    return max(dropped, 0.0) / others if others else 0.0


def leading(A: torch.Tensor, rank: int) -> Spectrum:
    """V (M, r) and sigma (r,) of A (n, M). At rank 0 nothing is decomposed."""
    return summarise(A, rank)[0] if rank else Spectrum(A.new_zeros(A.shape[1], 0), A.new_zeros(0))


class Sketch(NamedTuple):
    """The leading part V diag(sigma^2) V' of a positive semidefinite matrix, and the trace of the rest.

    Attributes:
        V: (M, r) unit columns, orthogonal except for rounding on the wire.
        sigma: (r,).
        dropped: e, at least 0.
    """

    V: torch.Tensor
    sigma: torch.Tensor
    dropped: float


def _shares(sketch: Sketch, QV: torch.Tensor, trace: float, mix: float) -> tuple[float, float, torch.Tensor]:
    """share and level of share Pi Q Pi + level Pi, Pi = I - V V', the substitute for a sketch's rest; V'QV (r, r)."""
    V, left = sketch.V, sketch.V.shape[0] - sketch.V.shape[1]
    inner = V.T @ QV
    # tr(Pi Q Pi), for columns that the wire has rounded too.
    outside = trace - 2 * float(inner.trace()) + float((inner * (V.T @ V)).sum())
    level = sketch.dropped / left if left else 0.0
    if not left or outside <= len(V) * torch.finfo(V.dtype).eps * trace:
        return 0.0, level, inner  # V holds all of Q
    return (1 - mix) * sketch.dropped / outside, mix * level, inner


def add_sketches(G: torch.Tensor, sketches: Sequence[Sketch], Q: torch.Tensor, mix: float) -> float:
    """Add sum_k V diag(sigma^2) V' + e [(1 - mix) Pi Q Pi / tr(Pi Q Pi) + mix Pi / (M - r)] to G + delta I, in place.

    Pi = I - V V'. Every term is positive semidefinite, and its trace is that of the sketched matrix. If V spans all of
    Q, the rest is spread evenly (mix 1). Columns are processed together, about M at a time, since
    Pi Q Pi = Q - V (QV)' - (QV) V' + V (V'QV) V'.

    Args:
        G: (M, M) symmetric.
        sketches: of any ranks.
        Q: (M, M) symmetric, positive semidefinite, of any scale.
        mix: 0 to 1.

    Returns:
        the number to be added to delta.
    """
    trace, total, delta = float(Q.trace()), 0.0, 0.0
    for group in _groups(sketches, len(G)):
        V = torch.cat([sketch.V for sketch in group], dim=1)
        QV = product(Q, V)
        rest = []
        for sketch, own in zip(group, QV.split([len(sketch.sigma) for sketch in group], dim=1), strict=True):
            share, level, inner = _shares(sketch, own, trace, mix)
            # Except for rounding on the wire, a retained eigenvalue is at least the mean of the dropped ones.
            eigenvalues = (sketch.sigma.square() - level).clamp_min(0)
            rest.append(share * own - sketch.V @ (share * inner + eigenvalues.diag()) / 2)
            total += share
            delta += level
        half = product(V, torch.cat(rest, dim=1).T)
        G.sub_(half).sub_(half.T)
    G.add_(Q, alpha=total)
    return delta


def _groups(sketches: Sequence[Sketch], columns: int) -> Iterator[list[Sketch]]:
    """The sketches in order, in groups of about this many columns."""
    group: list[Sketch] = []
    width = 0
    for sketch in sketches:
        group.append(sketch)
        width += len(sketch.sigma)
        if width >= columns:
            yield group
            group, width = [], 0
    if group:
        yield group
