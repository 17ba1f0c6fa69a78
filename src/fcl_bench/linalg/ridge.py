"""Ridge regression on what a method knows of the Gram matrix."""

from __future__ import annotations

import torch

from fcl_bench.linalg.spectral import Spectrum


def subspace_ridge(spectrum: Spectrum, B: torch.Tensor, ridge: float) -> torch.Tensor:
    """W = V (diag(sigma^2) + lambda I)^-1 V'B (FedRAN Eq. 29): ridge regression within the span of V.

    Args:
        spectrum: V (M, r), sigma (r,).
        B: (M, C) label-feature statistic.
        ridge: lambda > 0.

    Returns:
        W (M, C).
    """
    V, sigma = spectrum
    return V @ ((V.T @ B) / (sigma.square() + ridge).unsqueeze(1))
