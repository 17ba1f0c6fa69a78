"""Sums over samples: matrix products, Gram matrices by symmetric rank-k updates, and sums by class."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.linalg import blas

from fcl_bench.linalg.structure import mirror

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


#: Rows from which half a product and its mirroring take less time than a whole product, for every width.
_ROWS = 64


def gram(A: torch.Tensor) -> torch.Tensor:
    """A'A (M, M) of A (n, M), symmetric to the last bit where it is large."""
    if not large(A, A.shape[1]):
        return A.T @ A
    rows = (A if A.T.is_contiguous() else A.contiguous()).numpy()
    return torch.from_numpy(rows.T @ rows)  # NumPy sees that they are one matrix, and calls syrk


def add_gram(G: torch.Tensor, A: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    """G += weight A'A for a symmetric G (M, M), in place; returns G."""
    return add_grams(G, [A], weight)


def grams(blocks: Iterable[torch.Tensor], like: torch.Tensor, size: int) -> torch.Tensor:
    """G (M, M) = sum_b A_b'A_b for blocks A_b (n_b, M), symmetric.

    Args:
        blocks: A_b; none: G is zero.
        size: M.
    """
    return add_grams(like.new_empty(size, size), blocks, new=True)


def add_grams(
    G: torch.Tensor, blocks: Iterable[torch.Tensor], weight: float = 1.0, whole: bool = True, new: bool = False
) -> torch.Tensor:
    """G += weight sum_b A_b'A_b for a symmetric G (M, M) and blocks A_b (n_b, M), in place; returns G.

    Blocks are converted to G's type one by one, so many float32 rows can be summed in float64.

    Args:
        whole: false: the caller needs only the upper triangle.
        new: what G holds before is not read, and counts as zero.
    """
    half, beta = False, 0.0 if new else 1.0
    for A in blocks:
        A = A.to(G.dtype)
        if large(A, A.shape[1]) and G.is_contiguous() and (half or not whole or len(A) >= _ROWS):
            _add_upper_half(G, A, weight, beta)
            half = True
        else:
            G.addmm_(A.T, A, beta=beta, alpha=weight)
        beta = 1.0
    if not beta:
        G.zero_()
    return mirror(G) if half and whole else G


def _add_upper_half(G: torch.Tensor, A: torch.Tensor, weight: float, beta: float) -> None:
    """BLAS's syrk: the upper triangle of G = beta G + weight A'A."""
    syrk = blas.dsyrk if G.dtype == torch.float64 else blas.ssyrk
    # Read by columns, G is its own transpose.
    target = G.numpy().T
    a, turned = by_columns(A.T)
    result = syrk(weight, a, beta=beta, c=target, trans=turned, lower=1, overwrite_c=1)
    if result.ctypes.data != target.ctypes.data:
        raise ValueError("syrk copied the matrix it was to add to")


def add_class_sums(sums: torch.Tensor, H: torch.Tensor, which: torch.Tensor) -> None:
    """sums[c] += the sum of the rows of H with which = c, in place: one pass over H, where H'Y takes one per class.

    Args:
        sums: (c, M).
        H: (n, M).
        which: (n,) int64, the class of each row.
    """
    if H.is_cuda:
        # index_add_ is not deterministic there, and a matrix product costs little.
        sums.addmm_(torch.nn.functional.one_hot(which, len(sums)).to(H).T, H)
    else:
        sums.index_add_(0, which, H)


def class_sums(H: torch.Tensor, which: torch.Tensor, classes: int) -> torch.Tensor:
    """C = H'Y (M, classes) for the one-hot Y of `which`; see `add_class_sums`."""
    sums = H.new_zeros(classes, H.shape[1])
    add_class_sums(sums, H, which)
    return sums.T
