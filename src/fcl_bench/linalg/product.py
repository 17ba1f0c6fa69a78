"""Matrix products by SciPy's BLAS, whose LAPACK and rank-k updates the methods need beside them."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import blas

#: Multiplications from which it pays to call it.
_WORTHWHILE = 2**27


def product(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """AB (n, m) of A (n, k) and B (k, m), columns together in memory.

    torch's own product has threads of its own, which have to be woken while those of the factorisation before it still
    wait for work. In float64 SciPy's takes a tenth to a fifth less (`make bench`: random_features beside Z P).
    """
    if A.dtype != torch.float64 or not large(A, B.shape[1]):
        return (B.T @ A.T).T
    (a, a_turned), (b, b_turned) = by_columns(A), by_columns(B)
    return torch.from_numpy(blas.dgemm(1.0, a, b, trans_a=a_turned, trans_b=b_turned))


def large(A: torch.Tensor, columns: int) -> bool:
    """Whether the product of A with a matrix of so many columns is for a BLAS beside torch's."""
    return A.device.type == "cpu" and A.numel() * columns >= max(1, _WORTHWHILE)


def by_columns(A: torch.Tensor) -> tuple[np.ndarray, bool]:
    """A as BLAS takes it, columns together, without a copy if there is a way: A or its transpose, and whether it is."""
    if A.T.is_contiguous():
        return A.numpy(), False
    return A.contiguous().numpy().T, True
