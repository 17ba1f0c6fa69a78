"""A client's own ridge regression, and the Gram matrix that the aggregation of such solutions needs."""

from __future__ import annotations

import torch

from fcl_bench.linalg.gram import gram
from fcl_bench.linalg.solve import relative_rounding, solve_symmetric


def local_ridge(X: torch.Tensor, Y: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor, str]:
    """C = X'X + gamma I (d, d), W = C^-1 X'Y = X' (XX' + gamma I)^-1 Y (d, c), and a problem, if any ("": none).

    W is found through the smaller side; with gamma = 0 it is the Moore-Penrose solution.

    Args:
        X: (n, d).
        Y: (n, c).
        gamma: the ridge.
    """
    n, d = X.shape
    C = gram(X)
    rounding = relative_rounding(X.dtype)
    if n < d:
        W, _, trouble = solve_symmetric(gram(X.T), Y, rounding, gamma)
        W = (W.T @ X).T
    else:
        # In this order the product with Y's few columns takes a third of the time of X'Y.
        W, _, trouble = solve_symmetric(C, (Y.T @ X).T, rounding, gamma)
    C.diagonal().add_(gamma)
    return C, W, trouble
