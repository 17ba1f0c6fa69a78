"""Gram matrices by symmetric rank-k updates, which do half the work of a matrix product."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

#: Multiplications in the full product from which it pays to load SciPy for it.
_WORTHWHILE = 2**27
#: Rows and columns of a Gram matrix mirrored at a time.
_BLOCK = 512


def gram(A: torch.Tensor) -> torch.Tensor:
    """A'A (M, M) of A (n, M), symmetric to the last bit where it is large."""
    return add_gram(A.new_zeros(A.shape[1], A.shape[1]), A) if _large(A) else A.T @ A


def add_gram(G: torch.Tensor, A: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    """G += weight A'A for a symmetric G (M, M), in place; returns G."""
    return add_grams(G, [A], weight)


def add_grams(G: torch.Tensor, blocks: Iterable[torch.Tensor], weight: float = 1.0, whole: bool = True) -> torch.Tensor:
    """G += weight sum_b A_b'A_b for a symmetric G (M, M) and blocks A_b (n_b, M), in place; returns G.

    Blocks are converted to G's type one by one, so the sum of many float32 rows can be had in float64.

    Args:
        whole: false: the upper triangle is all that the caller needs.
    """
    half = False
    for A in blocks:
        A = A.to(G.dtype)
        if _large(A) and G.is_contiguous():
            _add_upper_half(G, A, weight)
            half = True
        else:
            G.addmm_(A.T, A, alpha=weight)
    return _mirror(G) if half and whole else G


def _transposed(A: torch.Tensor) -> tuple[np.ndarray, bool]:
    """A' by columns without a copy, or A by columns and that it is to be transposed."""
    return (A.numpy(), True) if A.T.is_contiguous() else (A.contiguous().numpy().T, False)


def _large(A: torch.Tensor) -> bool:
    return A.device.type == "cpu" and A.numel() * A.shape[1] >= max(1, _WORTHWHILE)


def _add_upper_half(G: torch.Tensor, A: torch.Tensor, weight: float) -> None:
    """BLAS's syrk: the upper triangle of G += weight A'A."""
    from scipy.linalg import blas

    syrk = blas.dsyrk if G.dtype == torch.float64 else blas.ssyrk
    # By columns G is its own transpose.
    target = G.numpy().T
    a, turn = _transposed(A)
    result = syrk(weight, a, beta=1.0, c=target, trans=turn, lower=1, overwrite_c=1)
    if result.ctypes.data != target.ctypes.data:
        raise ValueError("syrk copied the matrix it was to add to")


def _mirror(G: torch.Tensor) -> torch.Tensor:
    """Make a matrix symmetric whose upper triangle is right, in place and by blocks."""
    for begin in range(0, len(G), _BLOCK):
        end = begin + _BLOCK
        corner = G[begin:end, begin:end]
        corner.copy_(corner.triu() + corner.triu(1).T)
        G[end:, begin:end] = G[begin:end, end:].T
    return G
