"""The leading eigenvectors of a symmetric matrix."""

from __future__ import annotations

import numpy as np
import torch

#: Fewer vectors than this share are found one by one, more by divide and conquer.
_FEW = 0.25
#: Size from which it pays to turn back only the vectors asked for.
_LARGE = 256


def leading_eigenpairs(G: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest eigenvalues of G (n, n), ascending, and their eigenvectors (n, count).

    On the CPU as LAPACK's drivers do it, G = Q T Q' with T tridiagonal, but Q is multiplied by the vectors asked for
    alone. That is what makes `count` of n cheaper than all: 1.6 times at a quarter to a half (`make bench`).

    Args:
        G: float64, symmetric; its upper triangle is read, and all of it may be overwritten.
        count: 1 to n.

    Raises:
        LinAlgError: the eigenvalues did not converge, or some number of G is none.
    """
    n = len(G)
    if G.device.type != "cpu" or n < _LARGE:
        return _of_all(G, count)
    import scipy.linalg
    from scipy.linalg import lapack

    if count < _FEW * n:
        # LAPACK's syevr, for which torch has no call.
        values, vectors = scipy.linalg.eigh(
            G.numpy().T, subset_by_index=[n - count, n - 1], overwrite_a=True, check_finite=False
        )
        return torch.from_numpy(values), torch.from_numpy(vectors)
    stevd = getattr(lapack, "dstevd", None)
    if stevd is None:  # SciPy before 1.16
        return _of_all(G, count)
    lwork, _ = lapack.dsytrd_lwork(n, lower=1)
    reflectors, diagonal, off, scales, failed = lapack.dsytrd(G.numpy().T, lower=1, lwork=int(lwork), overwrite_a=1)
    values, vectors, diverged = stevd(diagonal, off, overwrite_d=1, overwrite_e=1)
    if failed or diverged or not np.isfinite(values).all():
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


def _of_all(G: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(G, UPLO="U")
    return values[len(G) - count :], vectors[:, len(G) - count :]
