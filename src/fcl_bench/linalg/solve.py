"""Solve symmetric systems A W = B; numerical trouble is reported, never hidden, and the result is never NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.linalg import lapack

from fcl_bench.linalg.gram import large

#: Ratio of noise to smallest eigenvalue from which a solution is doubtful; at 1 the eigenvalue is nothing but noise.
DOUBTFUL = 0.1
#: Steps of the two power iterations that estimate the extreme eigenvalues: within some percent of the largest.
_STEPS = 12
#: Number of unknowns up to which all eigenvalues are found faster than the two extreme ones.
_SMALL = 32
#: Rows whose squares are in memory at a time.
_ROWS = 64


class Solution(NamedTuple):
    """W and facts about its accuracy.

    Attributes:
        W: (M, C).
        condition: largest over smallest eigenvalue in absolute value, of the part of A that was solved; an estimate.
        trouble: what went wrong and what was done, in words; "" if nothing went wrong.
    """

    W: torch.Tensor
    condition: float
    trouble: str = ""


def solve_symmetric(S: torch.Tensor, B: torch.Tensor, rounding: float = 0.0, shift: float = 0.0) -> Solution:
    """W with A W = B, A = S + shift I, in float64, for an A that is positive semidefinite except for rounding.

    A positive definite A is solved by Cholesky. Otherwise the solution is the Moore-Penrose one from A's eigenvalues,
    without those that are nothing but noise. An eigenvalue below zero is noise, and its size is that of all noise:
    eigenvalues up to 1.5 times that size are left out. (An indefinite solve would amplify the noise instead.) If none
    is below zero, the noise is M * 2^-52 of the largest eigenvalue by the solve itself; and if the entries of S have
    independent relative errors `rounding`, 4 * rounding * sqrt(sum_ij v_i^2 v_j^2 S_ij^2) along the eigenvector v, and
    rounding^2 of the largest from its mixing with others.

    Besides S, it holds A and its factor in memory, and no other matrix of that size.

    Args:
        S: (M, M) symmetric; the lower triangle is read.
        B: (M, C).
        rounding: relative error of the entries of S; see `relative_rounding`.
        shift: a ridge, or (below zero) the sum of the regularisers to be removed from S; their rounding errors remain.
    """
    dtype, B = B.dtype, B.to(torch.float64)
    A = S.to(torch.float64, copy=True)
    A.diagonal().add_(shift)
    # Entries of size 1, so that no norm overflows or underflows.
    unit = max(float(end.abs()) for end in torch.aminmax(A)) if A.numel() else 0.0
    if unit == 0:
        return Solution(torch.zeros_like(B).to(dtype), 1.0, "the system is zero" if A.numel() else "")
    A, B = A.div_(unit), B / unit
    noise = _Noise(A, shift / unit, rounding)
    factor = _factored(A)
    if factor is not None:
        smallest, largest, v = extremes(A, factor)
        floor = float(noise.along(v, largest))
        if smallest > floor:
            condition = largest / smallest
            # Judged by the norm of all errors, though the error along this one direction may be smaller.
            doubt = max(floor, noise.norm(largest))
            trouble = ill_conditioned(condition, largest / doubt) if doubt > DOUBTFUL * smallest else ""
            return Solution(_solve_factored(factor, B).to(dtype), condition, trouble)
    return _pseudo_inverse(A, B, noise, unit, dtype)


def _pseudo_inverse(A: torch.Tensor, B: torch.Tensor, noise: _Noise, unit: float, dtype: torch.dtype) -> Solution:
    """The Moore-Penrose solution from the eigenvalues of A that are not noise; A and B come divided by `unit`."""
    values, V = torch.linalg.eigh(A)
    size = values.abs()
    largest = float(size.max())
    floors = noise.along(V, largest)
    below = int((values < -noise.solver(largest)).sum())
    if below:
        floors = torch.full_like(floors, -1.5 * float(values[0]))
    significant = values > floors
    rank = int(significant.sum())
    condition = largest / float(values[significant].min()) if rank else 1.0
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
    V = V[:, significant]
    return Solution((V @ ((V.T @ B) / values[significant].unsqueeze(1))).to(dtype), condition, trouble)


class _Noise:
    """How far rounding moves eigenvalues of S = A - shift I; see `solve_symmetric`."""

    def __init__(self, A: torch.Tensor, shift: float, rounding: float) -> None:
        self._A, self._rounding = A, rounding
        self._diagonal = A.diagonal() - shift

    def _scale(self, largest: float) -> float:
        """The largest eigenvalue, or S's largest entry if the removed regularisers outweighed it."""
        return max(largest, float(self._diagonal.max()))

    def norm(self, largest: float) -> float:
        """The spectral norm of all errors together, for eigenvectors in generic directions."""
        return 8 * self._rounding / len(self._A) ** 0.5 * self._scale(largest)

    def solver(self, largest: float) -> float:
        """The noise of the solve itself."""
        return len(self._A) * torch.finfo(self._A.dtype).eps * self._scale(largest)

    def along(self, V: torch.Tensor, largest: float) -> torch.Tensor:
        """(k,) the noise of eigenvalues with eigenvectors V (M, k); `largest` is that of the system."""
        solver = torch.full((V.shape[1],), self.solver(largest), dtype=V.dtype, device=V.device)
        if self._rounding == 0:
            return solver
        weights = V.square()
        # S differs from A on the diagonal only; it is squared in blocks of rows, since S^2 would need another matrix.
        first = ((self._diagonal.square() - self._A.diagonal().square()).unsqueeze(1) * weights.square()).sum(dim=0)
        for rows, own in zip(self._A.split(_ROWS), weights.split(_ROWS), strict=True):
            first += ((rows.square() @ weights) * own).sum(dim=0)
        return solver + 4 * self._rounding * first.clamp_min(0).sqrt() + self._rounding**2 * self._scale(largest)


def ill_conditioned(condition: float, resolved: float) -> str:
    """The message for a system whose condition number is near or above what its numbers resolve."""
    return (
        f"the system is ill-conditioned: condition number {condition:.1e}, and what was summed and sent resolves"
        f" {resolved:.1e}; a larger ridge, dtype=float64 or wire.dtype=float64 would help"
    )


def relative_rounding(*dtypes: torch.dtype) -> float:
    """Relative error of entries that were summed and sent in `dtypes`; the solve accounts for float64's."""
    return sum(torch.finfo(dtype).eps for dtype in dtypes if dtype != torch.float64)


def _factored(A: torch.Tensor) -> torch.Tensor | None:
    """L (M, M), lower triangular, with A = L L', read from A's lower triangle; None: A is not positive definite.

    SciPy's LAPACK takes half the time of the one that torch comes with (docs/results/benchmarks.md).
    """
    if not large(A, len(A)):
        factor, failed = torch.linalg.cholesky_ex(A)
        return None if bool(failed) else factor
    # Read by columns, A's lower triangle is the upper one of its transpose.
    upper, failed = lapack.dpotrf(A.numpy().T, lower=0)
    return None if failed else torch.from_numpy(upper).mT


def extremes(A: torch.Tensor, factor: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Smallest and largest eigenvalue of a positive definite A with its Cholesky factor, and the smallest's vector.

    Inverse and power iteration give estimates from within: the smallest is never too small, the largest never too
    large. They are exact if the system is so small that this takes no longer.
    """
    if len(A) <= _SMALL:
        values, V = torch.linalg.eigh(A)
        return float(values[0]), float(values[-1]), V[:, :1]
    # A fixed start, generic enough to have a component along every eigenvector in practice.
    start = torch.linspace(1.0, 2.0, len(A), dtype=A.dtype, device=A.device).sin().unsqueeze(1)
    largest = inverse = torch.ones((), dtype=A.dtype, device=A.device)
    up = down = start / torch.linalg.vector_norm(start)
    for _ in range(_STEPS):
        up = A @ up
        largest = torch.linalg.vector_norm(up)
        up = up / largest
        down = _solve_factored(factor, down)
        inverse = torch.linalg.vector_norm(down)
        down = down / inverse
    return float(1 / inverse), float(largest), down


def _solve_factored(L: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """X with L L' X = B: `torch.cholesky_solve` without its copy of L, which costs ten times as much as one column."""
    return torch.linalg.solve_triangular(L.mT, torch.linalg.solve_triangular(L, B, upper=False), upper=True)
