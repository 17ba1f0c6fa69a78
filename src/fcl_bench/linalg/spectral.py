"""Low-rank summaries of Gram matrices, by their leading eigenvectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.linalg
import torch
from scipy.linalg import lapack

from fcl_bench.linalg.gram import add_grams, product

#: Smallest ratio of retained singular values at which V = H'U / sigma is orthonormal to 1e-10.
_WELL_CONDITIONED = 1e-3
#: Rows of a float32 matrix that are converted to float64 at a time.
_ROWS = 1024


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

    Works in float64 through the eigenvalues of the smaller of HH' (n, n) and H'H (M, M), whatever type H is in and the
    sketch is returned in. If n < M, V sigma = H'U is formed from H itself, so the sketch is accurate to rounding in
    every kept direction, however small. Only the orthonormality of V suffers from the squared condition number; where
    that matters, one QR-SVD of the retained factor restores it. Directions whose singular value is zero to rounding are
    left out: they would carry arbitrary vectors.

    Returns:
        the summary, and the spectral norm of the dropped part: sigma_{r+1}^2 (0 if nothing is dropped).
    """
    return truncated(H, rank, partial(upper_gram, H.T if len(H) < H.shape[1] else H))


def truncated(H: torch.Tensor, rank: int, side: Callable[[], torch.Tensor]) -> tuple[Spectrum, float]:
    """`summarise`, given a function for the upper triangle of the smaller of HH' and H'H in float64."""
    n, M = H.shape
    keep = min(rank, n, M)
    if keep == 0:
        return Spectrum(H.new_zeros(M, 0), H.new_zeros(0)), _largest_eigenvalue(H)
    wide = n < M
    values, vectors = leading_eigenpairs(side(), min(keep + 1, n, M))
    residual = max(float(values[-keep - 1]), 0.0) if keep < len(values) else 0.0
    top = vectors[:, -keep:].T.flip(0).T  # descending, in column order
    mapped = _product(H.T if wide else H, top)
    sigma = torch.linalg.vector_norm(mapped, dim=0)
    factor = mapped if wide else top
    positive = sigma > sigma.max() * max(n, M) * torch.finfo(H.dtype).eps
    if not bool(positive.all()):
        factor, sigma = factor[:, positive], sigma[positive]
    if wide and len(sigma) and float(sigma.min() / sigma.max()) < _WELL_CONDITIONED:
        found = orthonormalised(factor)
    else:
        found = _descending(factor.div_(sigma) if wide else factor, sigma)
    return Spectrum(found.V.to(H.dtype), found.sigma.to(H.dtype)), residual


def orthonormalised(A: torch.Tensor) -> Spectrum:
    """The sketch of AA' by QR and SVD without zero directions: orthonormal for every condition number of A (M, r)."""
    Q, R = torch.linalg.qr(A)
    U, S, _ = torch.linalg.svd(R, full_matrices=False)
    rank = int((S.max() * max(A.shape) * torch.finfo(A.dtype).eps < S).sum()) if len(S) else 0
    return Spectrum(Q @ U[:, :rank], S[:rank])


def _largest_eigenvalue(H: torch.Tensor) -> float:
    """||H||^2 in the spectral norm; 0 for an empty H."""
    return (
        float(torch.linalg.eigvalsh(upper_gram(H.T if len(H) < H.shape[1] else H), UPLO="U")[-1]) if H.numel() else 0.0
    )


def upper_gram(A: torch.Tensor) -> torch.Tensor:
    """The upper triangle of A'A, always in float64, since it has the square of A's condition number."""
    G = torch.zeros(A.shape[1], A.shape[1], dtype=torch.float64, device=A.device)
    return add_grams(G, _blocks(A), whole=False)


def _product(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """AB in float64 for a B in float64, in column order."""
    blocks = [product(block.to(torch.float64), B) for block in _blocks(A)]
    return blocks[0] if len(blocks) == 1 else torch.cat([block.T for block in blocks], dim=1).T


def _blocks(A: torch.Tensor) -> Sequence[torch.Tensor]:
    """The rows of A: all at once, or in groups small enough to be converted to float64 one by one."""
    return [A] if A.dtype == torch.float64 else A.split(_ROWS)


def _descending(V: torch.Tensor, sigma: torch.Tensor) -> Spectrum:
    if bool((sigma[:-1] >= sigma[1:]).all()):
        return Spectrum(V, sigma)
    order = torch.argsort(sigma, descending=True, stable=True)
    return Spectrum(V[:, order], sigma[order])


#: Below this share of all vectors they are computed one by one, above it by divide and conquer.
_FEW = 0.25
#: Size from which it saves time to transform back only the requested vectors.
_LARGE = 256


def leading_eigenpairs(G: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest eigenvalues of G (n, n), ascending, and their eigenvectors (n, count).

    On the CPU as LAPACK's drivers do it, G = Q T Q' with T tridiagonal, but Q is multiplied by the requested vectors
    alone. This makes `count` of n vectors cheaper than all n: 1.6 times if `count` is a quarter to a half of n
    (`make bench`).

    Args:
        G: float64, symmetric; its upper triangle is read, and all of it may be overwritten.
        count: 1 to n.

    Raises:
        LinAlgError: the eigenvalues were not found, for example because G has a NaN.
    """
    n = len(G)
    find = _of_all if G.device.type != "cpu" or n < _LARGE else _one_by_one if count < _FEW * n else _turned_back
    values, vectors = find(G, count)
    if len(values) != count or not bool(torch.isfinite(values).all()):
        raise torch.linalg.LinAlgError(f"the eigenvalues of a matrix of {n} x {n} were not found")
    return values, vectors


def _of_all(G: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(G, UPLO="U")
    return values[len(G) - count :], vectors[:, len(G) - count :]


def _one_by_one(G: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """LAPACK's syevr, for which torch has no call; it fails on some spectra, such as nearly equal eigenvalues."""
    which = [len(G) - count, len(G) - 1]
    try:
        values, vectors = scipy.linalg.eigh(G.numpy().T, subset_by_index=which, check_finite=False)
    except scipy.linalg.LinAlgError:
        return _turned_back(G, count)
    if len(values) != count:
        return _turned_back(G, count)
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _turned_back(G: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvectors of T by divide and conquer, then Q times the requested ones."""
    stevd = getattr(lapack, "dstevd", None)
    if stevd is None:  # SciPy before 1.16
        return _of_all(G, count)
    n = len(G)
    lwork, _ = lapack.dsytrd_lwork(n, lower=1)
    reflectors, diagonal, off, scales, failed = lapack.dsytrd(G.numpy().T, lower=1, lwork=int(lwork), overwrite_a=1)
    values, vectors, diverged = stevd(diagonal, off, overwrite_d=1, overwrite_e=1)
    if failed or diverged:
        raise torch.linalg.LinAlgError(f"the eigenvalues of a matrix of {n} x {n} did not converge")
    chosen = np.asfortranarray(vectors[:, n - count :])
    # The first row is T's own; Q's reflectors, below the first subdiagonal, are those of a QR factorisation.
    below = np.asfortranarray(reflectors[1:, :-1])
    rows = np.asfortranarray(chosen[1:])
    _, work, _ = lapack.dormqr("L", "N", below, scales, rows, lwork=-1)
    chosen[1:], _, failed = lapack.dormqr("L", "N", below, scales, rows, lwork=int(work[0]), overwrite_c=1)
    if failed:
        raise torch.linalg.LinAlgError(f"LAPACK's dormqr refused argument {-failed}")
    return torch.from_numpy(values[n - count :]), torch.from_numpy(chosen)
