"""The mean of linear layers that least squares asks for (RegMean; Jin et al., ICLR 2023): each weighs by its inputs.

Clients k have weights W_k (o, i) of one layer and inputs X_k (n_k, i) of it. The W that comes closest to all of their
outputs, min_W sum_k ||(W - W_k) X_k'||^2, is

    W = (sum_k W_k G_k)(sum_k G_k)^+,    G_k = X_k'X_k.

A Gram matrix is (i, i), or (i,), its diagonal alone: W is then a weighted mean in every column.
"""

from __future__ import annotations

import torch

from fcl_bench.linalg.solve import solve_symmetric


def merged_weights(
    sums_WG: torch.Tensor, sums_G: torch.Tensor, near: torch.Tensor | None = None, rounding: float = 0.0
) -> torch.Tensor:
    """W (o, i) = (sum_k W_k G_k)(sum_k G_k)^+ in float64.

    Args:
        sums_WG: (o, i) the sum of `weighted(W_k, G_k)`.
        sums_G: (i, i) the sum of the Gram matrices, or (i,) that of their diagonals.
        near: (o, i) what W is where no client has an input (outside the range of the sum); None: 0. Weights that are
            the same everywhere stay so whatever the inputs are, if this is they.
        rounding: relative error of the entries of the Gram matrices (`relative_rounding`); what is no larger than it
            makes is taken for no input.
    """
    G = sums_G.double()
    S = sums_WG.double()
    if near is not None:
        S = S - weighted(near, G)
    if G.ndim == 1:
        W = torch.where(G > 0, S / torch.where(G > 0, G, torch.ones_like(G)), torch.zeros_like(S))
    else:
        W = solve_symmetric((G + G.T) / 2, S.T, rounding).W.T
    return W if near is None else near.double() + W


def weighted(W: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """W G (o, i) in float64 of W (o, i) and a Gram matrix (i, i) or its diagonal (i,)."""
    W, G = W.double(), G.double()
    return W * G if G.ndim == 1 else W @ G


def damped(G: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha G + (1 - alpha) diag(G) of a Gram matrix (i, i): less of what is off the diagonal; a diagonal (i,) as is.

    Args:
        G: what the inputs of a layer sum up to.
        alpha: 1: G itself; 0: a diagonal matrix.
    """
    if G.ndim == 1 or alpha == 1:
        return G
    return (alpha * G).diagonal_scatter(G.diagonal())
