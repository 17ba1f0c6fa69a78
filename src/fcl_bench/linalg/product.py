"""Matrix products by SciPy's BLAS; the methods also need its LAPACK and rank-k updates."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import blas

#: Multiplications from which calling it saves time.
_WORTHWHILE = 2**26


def product(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """AB (n, m) of A (n, k) and B (k, m), columns together in memory.

    torch's product has its own threads, which must be woken while the threads of the preceding factorisation still wait
    for work. In float64 SciPy's product takes a tenth to a fifth less time (`make bench`: random_features against Z P).
    """
    if A.dtype != torch.float64 or not large(A, B.shape[1]):
        return (B.T @ A.T).T
    (a, a_turned), (b, b_turned) = by_columns(A), by_columns(B)
    return torch.from_numpy(blas.dgemm(1.0, a, b, trans_a=a_turned, trans_b=b_turned))


def large(A: torch.Tensor, columns: int) -> bool:
    """Whether the product of A with a matrix of this many columns should use SciPy's BLAS rather than torch's."""
    return A.device.type == "cpu" and A.numel() * columns >= max(1, _WORTHWHILE)


def by_columns(A: torch.Tensor) -> tuple[np.ndarray, bool]:
    """A or its transpose in BLAS's column order, without a copy if possible, and whether it is the transpose."""
    if A.T.is_contiguous():
        return A.numpy(), False
    return A.contiguous().numpy().T, True
