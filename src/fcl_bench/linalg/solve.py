"""Symmetric systems A W = B solved so that numerical trouble is told, never hidden and never NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Noise over smallest eigenvalue from which a solution is called doubtful; at 1 the eigenvalue is nothing but noise.
DOUBTFUL = 0.1
#: Steps of the two power iterations that estimate the extreme eigenvalues: within some percent of the largest.
_STEPS = 12


class Solution(NamedTuple):
    """W and what is to be known about it.

    Attributes:
        W: (M, C).
        condition: largest over smallest eigenvalue in absolute value, of the part of A that was solved; an estimate.
        trouble: what went wrong and what was done, in words; "" where nothing did.
    """

    W: torch.Tensor
    condition: float
    trouble: str = ""


def solve_symmetric(A: torch.Tensor, B: torch.Tensor, noise: float, scale: float = 0.0) -> Solution:
    """W with A W = B, in float64.

    Positive definite A: by Cholesky. Else through A's eigenvalues, leaving out those that are nothing but noise: the
    Moore-Penrose solution where A is singular, an indefinite solve where it has eigenvalues below zero.

    Args:
        A: (M, M) symmetric; the lower triangle is read.
        B: (M, C).
        noise: error of A's eigenvalues relative to the largest; see `noise_floor`.
        scale: size of what A was computed from, where that cancelled out and left its rounding errors.
    """
    dtype, A, B = B.dtype, A.to(torch.float64), B.to(torch.float64)
    # Entries of size 1, so that no norm overflows or underflows.
    unit = float(A.abs().max()) if A.numel() else 0.0
    if unit == 0:
        return Solution(torch.zeros_like(B).to(dtype), 1.0, "the system is zero" if A.numel() else "")
    A, B, scale = A / unit, B / unit, scale / unit
    factor, failed = torch.linalg.cholesky_ex(A)
    if not bool(failed):
        smallest, largest = _extremes(A, factor)
        floor = noise * max(largest, scale)
        if smallest > floor:
            condition = largest / smallest
            trouble = ill_conditioned(condition, largest / floor) if floor > DOUBTFUL * smallest else ""
            return Solution(torch.cholesky_solve(B, factor).to(dtype), condition, trouble)
    values, V = torch.linalg.eigh(A)
    size = values.abs()
    largest = float(size.max())
    floor = noise * max(largest, scale)
    kept = size > floor
    rank, below = int(kept.sum()), int((values < -floor).sum())
    condition = largest / float(size[kept].min()) if rank else 1.0
    if below:
        smallest = unit * float(values[0])
        trouble = (
            f"the system is indefinite: smallest eigenvalue {smallest:.3g}, {below} of {len(values)} below zero,"
            f" condition number {condition:.1e}; solved as it is, a ridge larger by {-smallest:.3g} would make it"
            " definite"
        )
    elif rank < len(values):
        trouble = (
            f"the system is singular to rounding: rank {rank} of {len(values)}, condition number above {1 / noise:.1e},"
            f" that of the rest {condition:.1e}; Moore-Penrose solution"
        )
    else:
        trouble = ill_conditioned(condition, largest / floor)
    V = V[:, kept]
    return Solution((V @ ((V.T @ B) / values[kept].unsqueeze(1))).to(dtype), condition, trouble)


def ill_conditioned(condition: float, resolved: float) -> str:
    """The trouble with a system whose condition number is near or above what its numbers resolve."""
    return (
        f"the system is ill-conditioned: condition number {condition:.1e}, and what was summed and sent resolves"
        f" {resolved:.1e}; a larger ridge, dtype=float64 or wire.dtype=float64 would help"
    )


def noise_floor(size: int, *dtypes: torch.dtype) -> float:
    """Error in the eigenvalues of a Gram matrix (size, size) relative to its largest one.

    The solver's own, size * 2^-52; and for each of `dtypes` (of the sums, of the wire) that is coarser than float64 the
    spectral norm of independent rounding errors in the entries, about 8 * eps / sqrt(size).
    """
    rounding = sum(8 * torch.finfo(dtype).eps / max(size, 1) ** 0.5 for dtype in dtypes if dtype != torch.float64)
    return max(size, 1) * torch.finfo(torch.float64).eps + rounding


def _extremes(A: torch.Tensor, factor: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest eigenvalue of a positive definite A with its Cholesky factor, by power iterations.

    Estimates from within: the smallest is never too small, the largest never too large.
    """
    # A fixed start, generic enough that in practice it has a part along every eigenvector.
    start = torch.linspace(1.0, 2.0, len(A), dtype=A.dtype, device=A.device).sin().unsqueeze(1)
    largest = inverse = torch.ones((), dtype=A.dtype, device=A.device)
    up = down = start / start.norm()
    for _ in range(_STEPS):
        up = A @ up
        largest = up.norm()
        up = up / largest
        down = torch.cholesky_solve(down, factor)
        inverse = down.norm()
        down = down / inverse
    return float(1 / inverse), float(largest)
