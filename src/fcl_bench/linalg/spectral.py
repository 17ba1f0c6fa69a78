"""Low-rank summaries of Gram matrices: truncation of H, and the merge of summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Smallest ratio of kept singular values at which V = H'U / sigma is orthonormal to 1e-10 (float64), 1e-5 (float32).
_WELL_CONDITIONED = {torch.float64: 1e-3, torch.float32: 1e-1}


class Spectrum(NamedTuple):
    """The sketch V diag(sigma^2) V' of a Gram matrix.

    Attributes:
        V: (M, r) orthonormal columns.
        sigma: (r,) descending, positive.
    """

    V: torch.Tensor
    sigma: torch.Tensor


def summarise(H: torch.Tensor, rank: int) -> tuple[Spectrum, float]:
    """The best rank-r sketch of H'H: thin SVD of H (n, M), truncated to r = min(rank, n, M) (FedRAN Eq. 9).

    Works through the eigenvalues of the smaller of HH' (n, n) and H'H (M, M). Where n < M, V sigma = H'U is formed from
    H itself, so the sketch is accurate to rounding in every direction it keeps, however small. Only the orthonormality
    of V suffers from the squared condition number; where it would show, one QR-SVD of the kept factor restores it.
    Directions whose singular value is zero to rounding are left out: they would carry arbitrary vectors.

    Returns:
        the summary, and the spectral norm of what it drops: sigma_{r+1}^2 (0 where nothing is left).
    """
    n, M = H.shape
    keep = min(rank, n, M)
    if keep == 0:
        return Spectrum(H.new_zeros(M, 0), H.new_zeros(0)), _largest_eigenvalue(H)
    wide = n < M
    values, vectors = _leading(_gram(H.T if wide else H), keep + 1)
    residual = max(float(values[-keep - 1]), 0.0) if keep < len(values) else 0.0
    top = vectors[:, -keep:].flip(1).to(H.dtype)
    if wide:
        factor = H.T @ top
        sigma = torch.linalg.vector_norm(factor, dim=0)
    else:
        factor = top
        sigma = torch.linalg.vector_norm(H @ top, dim=0)
    eps = torch.finfo(H.dtype).eps
    positive = sigma > sigma.max() * max(n, M) * eps
    factor, sigma = factor[:, positive], sigma[positive]
    if not wide:
        return _descending(factor, sigma), residual
    if len(sigma) and float(sigma.min() / sigma.max()) < _WELL_CONDITIONED[H.dtype]:
        return _orthonormalised(factor), residual
    return _descending(factor / sigma, sigma), residual


def merge(summaries: Sequence[Spectrum], rank: int) -> tuple[Spectrum, float]:
    """Merge sketches into the best rank-r sketch of their sum (FedRAN Eq. 16-19), without forming it.

    With A = [V_1 diag(s_1), V_2 diag(s_2), ...], the sum is AA': V and sigma are A's leading left singular vectors and
    singular values. The paper gets them by a QR of A and an SVD of R, here they come from the smaller Gram side of A,
    as in `summarise`, at about half the cost. No matrix is larger than A (M, sum of the ranks); an empty sketch leaves
    the other as is.

    Returns:
        the merged sketch, and the first dropped eigenvalue of AA' (0 where nothing is dropped).
    """
    summaries = [summary for summary in summaries if len(summary.sigma)] or list(summaries[:1])
    if len(summaries) == 1 and len(summaries[0].sigma) <= rank:
        return summaries[0], 0.0
    return summarise(torch.cat([V * sigma for V, sigma in summaries], dim=1).T, rank)


def _orthonormalised(A: torch.Tensor) -> Spectrum:
    """The sketch of AA' by QR and SVD, zero directions left out: exact orthonormality at any condition of A (M, r)."""
    Q, R = torch.linalg.qr(A)
    U, S, _ = torch.linalg.svd(R, full_matrices=False)
    rank = int((S.max() * max(A.shape) * torch.finfo(A.dtype).eps < S).sum()) if len(S) else 0
    return Spectrum(Q @ U[:, :rank], S[:rank])


def _leading(G: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest eigenvalues of a symmetric G, ascending, and their vectors (or more than `count` of both)."""
    if G.device.type != "cpu" or 4 * count > len(G):
        return torch.linalg.eigh(G)
    # LAPACK's syevr finds few of many eigenvectors in a third of the time of all; torch has no call for it.
    import scipy.linalg

    values, vectors = scipy.linalg.eigh(
        G.numpy(), subset_by_index=[len(G) - count, len(G) - 1], overwrite_a=True, check_finite=False
    )
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _largest_eigenvalue(H: torch.Tensor) -> float:
    """||H||^2 in the spectral norm; 0 for an empty H."""
    return float(torch.linalg.eigvalsh(_gram(H.T if len(H) < H.shape[1] else H))[-1]) if H.numel() else 0.0


def _gram(A: torch.Tensor) -> torch.Tensor:
    """A'A in float64 whatever A is in, since it has the square of A's condition number; by blocks of rows."""
    if A.dtype == torch.float64:
        return A.T @ A
    total = torch.zeros(A.shape[1], A.shape[1], dtype=torch.float64, device=A.device)
    for block in A.split(1024):
        wide = block.to(torch.float64)
        total.addmm_(wide.T, wide)
    return total


def _descending(V: torch.Tensor, sigma: torch.Tensor) -> Spectrum:
    order = torch.argsort(sigma, descending=True, stable=True)
    return Spectrum(V[:, order], sigma[order])
