"""Covariances for Mahalanobis distances: shrinkage, correlations, whitening."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fcl_bench.linalg.solve import extremes

#: Relative rounding of float64, which `linalg.solve.relative_rounding` does not include.
EPS = 2.0**-52


class Whitening(NamedTuple):
    """The factor that gives distances under a covariance S: r' S^+ r = |r T|^2.

    Attributes:
        factor: T, (d, d) upper triangular.
        condition: largest over smallest eigenvalue of the inverted part; an estimate.
        rank: the rank of S beyond its rounding; below d the inverse is the Moore-Penrose one.
        indefinite: whether S has eigenvalues below zero beyond its rounding, which are left out too.
    """

    factor: torch.Tensor
    condition: float
    rank: int
    indefinite: bool = False


def scatter(second: torch.Tensor, products: torch.Tensor, rounding: float = 0.0) -> torch.Tensor:
    """sum (h - m)(h - m)' = Q - n m m' (d, d); zero in features that vary by rounding only.

    Args:
        second: Q, the sum of h h'.
        products: n m m' with n samples of mean m; of several classes the sum over them.
        rounding: relative error of the entries of `second` beside float64's.
    """
    made = second - products
    constant = made.diagonal() <= 8 * (rounding + EPS) * second.diagonal()
    made[constant] = 0
    made[:, constant] = 0
    return made


def shrunk(S: torch.Tensor, a1: float, a2: float) -> torch.Tensor:
    """S + a1 V1 I + a2 V2 (1 1' - I): V1 is the mean of the diagonal, V2 that of the nonzero entries off it."""
    variance = S.diagonal().mean()
    beside = S - torch.diag(S.diagonal())
    V2 = beside.sum() / beside.count_nonzero().clamp_min(1)
    made = S + a2 * V2
    made.diagonal().add_(a1 * variance - a2 * V2)
    return made


def deviations(S: torch.Tensor) -> torch.Tensor:
    """(d,) standard deviations; 1 for a feature that does not vary."""
    variances = S.diagonal()
    return torch.where(variances > 0, variances, 1.0).sqrt()


def correlations(S: torch.Tensor) -> torch.Tensor:
    """S_ij / (s_i s_j) (d, d), 1 on the diagonal; a feature that does not vary has no correlation with any other."""
    s = deviations(S)
    made = S / s / s.unsqueeze(1)
    made.diagonal().fill_(1)
    return made


def whitening(S: torch.Tensor, noise: float = 0.0) -> Whitening:
    """T with T T' = S^+, the Moore-Penrose inverse of a positive semidefinite S, in float64.

    For a positive definite S, T = L^-T with its Cholesky factor L; otherwise T uses the eigenvalues above rounding.

    Args:
        S: (d, d).
        noise: how far rounding moves eigenvalues, besides d 2^-52 of the largest by the factorisation itself.
    """
    S = S.double()
    L, failed = torch.linalg.cholesky_ex(S)
    if not bool(failed):
        smallest, largest, _ = extremes(S, L)
        if smallest > max(noise, len(S) * EPS * largest):
            identity = torch.eye(len(S), dtype=S.dtype, device=S.device)
            return Whitening(torch.linalg.solve_triangular(L.mT, identity, upper=True), largest / smallest, len(S))
    values, V = torch.linalg.eigh(S)
    floor = max(noise, len(S) * EPS * float(values.abs().max()))
    indefinite = bool(values[0] < -floor)
    # An eigenvalue below zero is noise, and one not half again as large may be noise too; see `solve_symmetric`.
    significant = values > max(floor, -1.5 * float(values[0]))
    F = V[:, significant] / values[significant].sqrt()
    # F = T Q' with T upper triangular: the QR factorisation of F' in reversed order.
    R = torch.linalg.qr(F.flip(0).T).R
    T = torch.nn.functional.pad(R, (0, 0, 0, len(S) - len(R))).T.flip(0, 1)
    kept = values[significant]
    return Whitening(T, float(kept.max() / kept.min()) if len(kept) else 1.0, len(kept), indefinite)
