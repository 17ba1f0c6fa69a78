"""The mean of linear layers by least squares on their inputs (RegMean; Jin et al., ICLR 2023).

Clients k have weights W_k (o, i) of one layer and inputs X_k (n_k, i) of it. The W that best reproduces all of their
outputs, min_W sum_k ||(W - W_k) X_k'||^2, is

    W = (sum_k W_k G_k)(sum_k G_k)^+,    G_k = X_k'X_k.

A Gram matrix is (i, i), or (i,) if it is its diagonal alone; W is then a weighted mean in every column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fcl_bench.linalg.solve import solve_symmetric
from fcl_bench.protocol.fields import MOMENTS, Field, Side, gram_matrix, real

#: The prefix of a layer's name that gives the name of its Gram matrix in an upload.
GRAM = "gram."


def declared_gram(side: Side, alpha: float, **known: Any) -> Field:
    """A client's damped Gram matrix, or its diagonal with alpha = 0; `known` are further attributes of `Field`."""
    if alpha == 0:
        return real(side, least=0, leaks=MOMENTS, **known)
    return gram_matrix(side, leaks=MOMENTS, **known)


def merged_weights(
    sums_WG: torch.Tensor, sums_G: torch.Tensor, near: torch.Tensor, rounding: float = 0.0
) -> torch.Tensor:
    """W (o, i) = (sum_k W_k G_k)(sum_k G_k)^+ in float64.

    Args:
        sums_WG: (o, i) the sum of `weighted(W_k, G_k)`.
        sums_G: (i, i) the sum of the Gram matrices, or (i,) that of their diagonals.
        near: (o, i) W where no client has an input (outside the range of the sum), such as the mean of the W_k. Weights
            that are the same at all clients then stay the same whatever the inputs are.
        rounding: relative error of the entries of the Gram matrices (`relative_rounding`); eigenvalues that are no
            larger than such errors count as no input.
    """
    G = sums_G.double()
    S = sums_WG.double() - weighted(near, G)
    if G.ndim == 1:
        W = torch.where(G > 0, S / torch.where(G > 0, G, torch.ones_like(G)), torch.zeros_like(S))
    else:
        W = solve_symmetric((G + G.T) / 2, S.T, rounding).W.T
    return near.double() + W


def weighted(W: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """W G (o, i) in float64 of W (o, i) and a Gram matrix (i, i) or its diagonal (i,)."""
    W, G = W.double(), G.double()
    return W * G if G.ndim == 1 else W @ G


def damped(G: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha G + (1 - alpha) diag(G) of a Gram matrix (i, i): smaller off-diagonal entries; a diagonal (i,) stays.

    Args:
        G: the Gram matrix of a layer's inputs.
        alpha: 1: G itself; 0: a diagonal matrix.
    """
    if G.ndim == 1 or alpha == 1:
        return G
    return (alpha * G).diagonal_scatter(G.diagonal())


class RegressionSums:
    """Running sums of W_k G_k and G_k over clients for many layers, in float64. Several W may share a G.

    Args:
        rounding: see `merged_weights`.

    Attributes:
        products: the sum of W_k G_k (o, i), by the name of W.
        grams: the sum of G_k (i, i) or (i,), by its own name.
    """

    state = ("products", "grams")

    def __init__(self, rounding: float = 0.0) -> None:
        self.rounding = rounding
        self.products: dict[str, torch.Tensor] = {}
        self.grams: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        self.products, self.grams = {}, {}

    def add(
        self, grams: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], merged_by: Mapping[str, str]
    ) -> None:
        """Add one client's weights and Gram matrices.

        Args:
            grams: G_k by name. Each is made symmetric, since the wire may round its two halves apart.
            weights: W_k by name; there may be others.
            merged_by: for each W, the name of its G.
        """
        own = {name: G.double() if G.ndim == 1 else (G.double() + G.double().T) / 2 for name, G in grams.items()}
        for name, by in merged_by.items():
            product = weighted(weights[name], own[by])
            self.products[name] = self.products[name] + product if name in self.products else product
        for name, G in own.items():
            self.grams[name] = self.grams[name] + G if name in self.grams else G

    def merged(self, merged_by: Mapping[str, str], near: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`merged_weights` of each W.

        Args:
            merged_by: for each W, the name of its G.
            near: each W where no client has an input.
        """
        return {
            name: merged_weights(self.products[name], self.grams[by], near[name], self.rounding)
            for name, by in merged_by.items()
        }
