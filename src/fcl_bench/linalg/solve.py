"""Symmetric systems A W = B solved so that numerical trouble is told, never hidden and never NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Noise over smallest eigenvalue from which a solution is called doubtful; at 1 the eigenvalue is nothing but noise.
DOUBTFUL = 0.1
#: Steps of the two power iterations that estimate the extreme eigenvalues: within some percent of the largest.
_STEPS = 12
#: Unknowns up to which all eigenvalues are found sooner than two.
_SMALL = 32
#: Rows whose squares are held at a time.
_ROWS = 64


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


def solve_symmetric(S: torch.Tensor, B: torch.Tensor, rounding: float = 0.0, shift: float = 0.0) -> Solution:
    """W with A W = B, A = S + shift I, in float64, for an A that is positive semidefinite but for rounding.

    Positive definite A: by Cholesky. Else through A's eigenvalues, leaving out those that are nothing but noise: the
    Moore-Penrose solution. An eigenvalue below zero is noise, and its size that of the others: what is not larger by
    half is left out. (An indefinite solve would amplify it instead.) Where none is below zero, noise is M * 2^-52 of
    the largest eigenvalue by the solve itself; and if the entries of S have independent relative errors `rounding`,
    4 * rounding * sqrt(sum_ij v_i^2 v_j^2 S_ij^2) along the eigenvector v, and rounding^2 of the largest from its
    mixing with others.

    Beside S it holds A and its factor, no other matrix of that size.

    Args:
        S: (M, M) symmetric; the lower triangle is read.
        B: (M, C).
        rounding: relative error of the entries of S; see `relative_rounding`.
        shift: a ridge, or (below zero) what regularisers are taken out of S, whose rounding errors stay in.
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
    factor, failed = torch.linalg.cholesky_ex(A)
    if not bool(failed):
        smallest, largest, v = extremes(A, factor)
        floor = float(noise.along(v, largest))
        if smallest > floor:
            condition = largest / smallest
            # Told by the norm of all errors, though what is lost along this one direction may be less.
            doubt = max(floor, noise.norm(largest))
            trouble = ill_conditioned(condition, largest / doubt) if doubt > DOUBTFUL * smallest else ""
            return Solution(_solve_factored(factor, B).to(dtype), condition, trouble)
    return _pseudo_inverse(A, B, noise, unit, dtype)


def _pseudo_inverse(A: torch.Tensor, B: torch.Tensor, noise: _Noise, unit: float, dtype: torch.dtype) -> Solution:
    """The Moore-Penrose solution from the eigenvalues of A that are no noise; A and B come divided by `unit`."""
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
    """How far rounding moves eigenvalues of S = A - shift I; see `solve_symmetric`."""

    def __init__(self, A: torch.Tensor, shift: float, rounding: float) -> None:
        self._A, self._rounding = A, rounding
        self._diagonal = A.diagonal() - shift

    def _scale(self, largest: float) -> float:
        """The largest eigenvalue, or S's largest entry where regularisers outweighed it."""
        return max(largest, float(self._diagonal.max()))

    def norm(self, largest: float) -> float:
        """The spectral norm of all errors together, for eigenvectors that point nowhere in particular."""
        return 8 * self._rounding / len(self._A) ** 0.5 * self._scale(largest)

    def solver(self, largest: float) -> float:
        """Of the solve itself."""
        return len(self._A) * torch.finfo(self._A.dtype).eps * self._scale(largest)

    def along(self, V: torch.Tensor, largest: float) -> torch.Tensor:
        """(k,) the noise of eigenvalues with eigenvectors V (M, k); `largest` is that of the system."""
        solver = torch.full((V.shape[1],), self.solver(largest), dtype=V.dtype, device=V.device)
        if self._rounding == 0:
            return solver
        weights = V.square()
        # S differs from A on the diagonal only; squared by blocks of rows, for S^2 would be another matrix.
        first = ((self._diagonal.square() - self._A.diagonal().square()).unsqueeze(1) * weights.square()).sum(dim=0)
        for rows, own in zip(self._A.split(_ROWS), weights.split(_ROWS), strict=True):
            first += ((rows.square() @ weights) * own).sum(dim=0)
        return solver + 4 * self._rounding * first.clamp_min(0).sqrt() + self._rounding**2 * self._scale(largest)


def ill_conditioned(condition: float, resolved: float) -> str:
    """The trouble with a system whose condition number is near or above what its numbers resolve."""
    return (
        f"the system is ill-conditioned: condition number {condition:.1e}, and what was summed and sent resolves"
        f" {resolved:.1e}; a larger ridge, dtype=float64 or wire.dtype=float64 would help"
    )


def relative_rounding(*dtypes: torch.dtype) -> float:
    """Relative error of entries that were summed and sent in `dtypes`; float64's is left to the solve."""
    return sum(torch.finfo(dtype).eps for dtype in dtypes if dtype != torch.float64)


def extremes(A: torch.Tensor, factor: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Smallest and largest eigenvalue of a positive definite A with its Cholesky factor, and the smallest's vector.

    By inverse and power iteration: estimates from within, the smallest never too small, the largest never too large.
    Exactly where the system is so small that this takes no longer.
    """
    if len(A) <= _SMALL:
        values, V = torch.linalg.eigh(A)
        return float(values[0]), float(values[-1]), V[:, :1]
    # A fixed start, generic enough that in practice it has a part along every eigenvector.
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
