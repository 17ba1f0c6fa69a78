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


def solve_symmetric(
    A: torch.Tensor, B: torch.Tensor, rounding: float = 0.0, summed: torch.Tensor | None = None
) -> Solution:
    """W with A W = B, in float64, for an A that is positive semidefinite but for rounding.

    Positive definite A: by Cholesky. Else through A's eigenvalues, leaving out those that are nothing but noise: the
    Moore-Penrose solution. An eigenvalue below zero is noise, and its size that of the others: what is not larger by
    half is left out. (An indefinite solve would amplify it instead.) Where none is below zero, noise is M * 2^-52 of
    the largest eigenvalue by the solve itself; and if the entries of a matrix S have independent relative errors
    `rounding`, 4 * rounding * sqrt(sum_ij v_i^2 v_j^2 S_ij^2) along the eigenvector v, and rounding^2 of the largest
    from its mixing with others.

    Args:
        A: (M, M) symmetric; the lower triangle is read.
        B: (M, C).
        rounding: relative error of the entries of `summed`; see `relative_rounding`.
        summed: S (M, M), what A was computed from, if regularisers were taken out of it; None: A itself.
    """
    dtype, A, B = B.dtype, A.to(torch.float64), B.to(torch.float64)
    # Entries of size 1, so that no norm overflows or underflows.
    unit = float(A.abs().max()) if A.numel() else 0.0
    if unit == 0:
        return Solution(torch.zeros_like(B).to(dtype), 1.0, "the system is zero" if A.numel() else "")
    A, B = A / unit, B / unit
    noise = _Noise(A if summed is None else summed.to(torch.float64) / unit, rounding)
    factor, failed = torch.linalg.cholesky_ex(A)
    if not bool(failed):
        smallest, largest, v = _extremes(A, factor)
        floor = float(noise.along(v, largest))
        if smallest > floor:
            condition = largest / smallest
            # Told by the norm of all errors, though what is lost along this one direction may be less.
            doubt = max(floor, noise.norm(largest))
            trouble = ill_conditioned(condition, largest / doubt) if doubt > DOUBTFUL * smallest else ""
            return Solution(torch.cholesky_solve(B, factor).to(dtype), condition, trouble)
    values, V = torch.linalg.eigh(A)
    size = values.abs()
    largest = float(size.max())
    floors = noise.along(V, largest)
    below = int((values < -noise.solver(largest)).sum())
    if below:
        floors = torch.full_like(floors, -1.5 * float(values[0]))
    kept = values > floors
    rank = int(kept.sum())
    condition = largest / float(values[kept].min()) if rank else 1.0
    if below:
        smallest = unit * float(values[0])
        trouble = (
            f"the system is indefinite: smallest eigenvalue {smallest:.3g}, {below} of {len(values)} below zero, so"
            f" rounding hides what is of that size; condition number of the {rank} larger ones {condition:.1e},"
            f" Moore-Penrose solution; a ridge above {-smallest:.3g}, or wire.dtype=float64, would make it definite"
        )
    elif rank < len(values):
        trouble = (
            f"the system is singular to rounding: rank {rank} of {len(values)}, condition number above"
            f" {largest / float(floors.min()):.1e}, that of the rest {condition:.1e}; Moore-Penrose solution"
        )
    else:
        trouble = ill_conditioned(condition, largest / float(floors.min()))
    V = V[:, kept]
    return Solution((V @ ((V.T @ B) / values[kept].unsqueeze(1))).to(dtype), condition, trouble)


class _Noise:
    """How far rounding moves eigenvalues of S; see `solve_symmetric`."""

    def __init__(self, S: torch.Tensor, rounding: float) -> None:
        self._S, self._rounding = S, rounding

    def norm(self, largest: float) -> float:
        """The spectral norm of all errors together, for eigenvectors that point nowhere in particular."""
        largest = max(largest, float(self._S.diagonal().max()))
        return 8 * self._rounding / len(self._S) ** 0.5 * largest

    def solver(self, largest: float) -> float:
        """Of the solve itself."""
        return len(self._S) * torch.finfo(self._S.dtype).eps * max(largest, float(self._S.diagonal().max()))

    def along(self, V: torch.Tensor, largest: float) -> torch.Tensor:
        """(k,) the noise of eigenvalues with eigenvectors V (M, k); `largest` is that of the system."""
        solver = torch.full((V.shape[1],), self.solver(largest), dtype=V.dtype, device=V.device)
        if self._rounding == 0:
            return solver
        weights = V.square()
        first = ((self._S.square() @ weights) * weights).sum(dim=0).clamp_min(0).sqrt()
        return solver + 4 * self._rounding * first + self._rounding**2 * max(largest, float(self._S.diagonal().max()))


def ill_conditioned(condition: float, resolved: float) -> str:
    """The trouble with a system whose condition number is near or above what its numbers resolve."""
    return (
        f"the system is ill-conditioned: condition number {condition:.1e}, and what was summed and sent resolves"
        f" {resolved:.1e}; a larger ridge, dtype=float64 or wire.dtype=float64 would help"
    )


def relative_rounding(*dtypes: torch.dtype) -> float:
    """Relative error of entries that were summed and sent in `dtypes`; float64's is left to the solve."""
    return sum(torch.finfo(dtype).eps for dtype in dtypes if dtype != torch.float64)


def _extremes(A: torch.Tensor, factor: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Smallest and largest eigenvalue of a positive definite A with its Cholesky factor, and the smallest's vector.

    By inverse and power iteration: estimates from within, the smallest never too small, the largest never too large.
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
    return float(1 / inverse), float(largest), down
